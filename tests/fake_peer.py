"""A peer without an engine: it answers with what it was asked, and fails as peers do."""

from __future__ import annotations

from bench.peers.protocol import Serve


def open_peer(model: str, dtype: str) -> Serve:
    """Serve nothing. The model "missing" can't be opened."""
    if model == "missing":
        raise ValueError("no such model")
    print("libraries print where they shouldn't")

    def serve(prompts: list[list[int]], output_lens: list[int]) -> tuple[float, float, int]:
        """Numbers that tell what arrived; a prompt of one token gets an answer that is too
        short."""
        print("at any time")
        return float(prompts[0][0]), float(len(prompts)), sum(output_lens) - (len(prompts[0]) == 1)

    return serve
