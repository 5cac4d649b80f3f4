"""What the host does each step, in microseconds: schedule, pack and commit of 256 decoding rows.

    python bench/host_step.py [--rows 256] [--blocks 50000] [--lengths 512 4096]

Each step generates a token for every row, as in a real run: blocks fill up, are published and
taken. Prints the median of each part, and the median of their sum as `step`, for each sequence
length, then for a small pool beside the large."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nva.state.engine import EngineState, empty
from nva.state.limits import Limits
from nva.state.plan import Sampled
from nva.state.request import SamplingParams, request
from nva.steps.commit import commit
from nva.steps.pack import pack
from nva.steps.schedule import schedule
from nva.steps.submit import submit

N_STEPS = 256


def decoding(n_rows: int, n_blocks: int, length: int) -> EngineState:
    """A state in which all rows have computed their prompts, of about that length and no two in the
    same phase."""
    limits = Limits(
        vocab_size=50_000,
        max_model_len=8192,
        n_blocks=n_blocks,
        max_rows=n_rows,
        max_batched_tokens=1 << 20,
    )
    params = SamplingParams(temperature=0, max_tokens=2 * N_STEPS)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, limits.vocab_size, length - i % 16) for i in range(n_rows)]
    state = submit(empty(limits), [request(i, prompt, params) for i, prompt in enumerate(prompts)])
    state, plan = schedule(state)
    return commit(state, plan, sampled(len(plan.sample_rows)))[0]


def sampled(n: int) -> Sampled:
    """Tokens as a sampler would give them."""
    tokens = np.random.default_rng(n).integers(0, 50_000, n).astype(np.int32)
    return Sampled(tokens=tokens, is_finite=np.ones(n, np.bool_))


def timed(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """The function's result and the microseconds it took."""
    start = time.perf_counter()
    result = function(*args)
    return result, (time.perf_counter() - start) * 1e6


def measure(state: EngineState) -> dict[str, float]:
    """Median microseconds of each part over N_STEPS decode steps."""
    parts: dict[str, list[float]] = {"schedule": [], "pack": [], "commit": []}
    for _ in range(N_STEPS):
        (state, plan), schedule_us = timed(schedule, state)
        (_, draw), pack_us = timed(pack, state, plan)
        tokens = sampled(len(draw.logit_rows))
        (state, _), commit_us = timed(commit, state, plan, tokens)
        for name, us in zip(parts, (schedule_us, pack_us, commit_us), strict=True):
            parts[name].append(us)
    steps = np.sum(list(parts.values()), axis=0)
    return {name: float(np.median(us)) for name, us in parts.items()} | {
        "step": float(np.median(steps))
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=50_000)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    shortest = args.lengths[0]
    small = args.rows * -(-(shortest + 2 * N_STEPS) // 16)
    cases = [
        (length, max(args.blocks, args.rows * -(-(length + 2 * N_STEPS) // 16)))
        for length in args.lengths
    ]
    print(f"{args.rows} rows; microseconds, median of {N_STEPS} steps")
    print(f"{'length':>8}{'blocks':>9}{'schedule':>10}{'pack':>8}{'commit':>8}{'step':>8}")
    figures = []
    for length, n_blocks in [*cases, (shortest, small)]:
        us = measure(decoding(args.rows, n_blocks, length))
        figures.append({"rows": args.rows, "length": length, "blocks": n_blocks, **us})
        print(
            f"{length:>8}{n_blocks:>9}{us['schedule']:>10.0f}{us['pack']:>8.0f}{us['commit']:>8.0f}{us['step']:>8.0f}"
        )
    if args.json:
        args.json.write_text(
            json.dumps({"title": "host work of a step", "rows": figures}, indent=2)
        )


if __name__ == "__main__":
    main()
