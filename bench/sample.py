"""What choosing tokens costs on a CPU, in milliseconds a step, by vocabulary, rows and what the
requests ask.

    python bench/sample.py [--rows 1 32 256] [--vocabularies 49152 151936] [--threads 2]

Logits are normal with a standard deviation of 3, and some hundred tokens stand out by 10, much as a
model's do at a word's beginning. Each figure is the median of some steps."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from nva.state.plan import Draw
from nva.state.request import NO_LOGPROBS, ROW_PARAMS
from nva.steps.sample import sample

KINDS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k 50, top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
}


def draw_of(n_rows: int, **fields: float) -> Draw:
    """A draw from each of so many rows of logits."""
    params = np.zeros(n_rows, ROW_PARAMS)
    for name, value in {
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "n_logprobs": NO_LOGPROBS,
        **fields,
    }.items():
        params[name] = value
    params["seed"] = np.arange(n_rows)
    return Draw(
        logit_rows=np.arange(n_rows, dtype=np.int32),
        params=params,
        samples=np.zeros(n_rows, np.int32),
        positions=np.full(n_rows, 7, np.int32),
        penalized=(),
        bias_at=np.zeros((0, 2), np.int32),
        bias=np.zeros(0),
        score_rows=np.zeros(0, np.int32),
        score_tokens=np.zeros(0, np.int32),
        n_score_logprobs=0,
    )


def milliseconds(logits: torch.Tensor, draw: Draw, seconds: float = 0.5) -> float:
    """The median over repeated draws, at least three of them."""
    taken: list[float] = []
    sample(logits, draw)
    while len(taken) < 3 or sum(taken) < seconds:
        start = time.perf_counter()
        sample(logits, draw)
        taken.append(time.perf_counter() - start)
    return float(np.median(taken)) * 1e3


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{'vocabulary':>10}{'rows':>6}" + "".join(f"{kind:>17}" for kind in KINDS))
    figures = []
    for size in args.vocabularies:
        for n_rows in args.rows:
            torch.manual_seed(0)
            logits = 3 * torch.randn(n_rows, size) + 10 * (torch.rand(n_rows, size) < 0.002)
            ms = {
                kind: milliseconds(logits, draw_of(n_rows, **fields))
                for kind, fields in KINDS.items()
            }
            figures.append({"vocabulary": size, "rows": n_rows, **ms})
            print(f"{size:>10}{n_rows:>6}" + "".join(f"{value:>17.2f}" for value in ms.values()))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
