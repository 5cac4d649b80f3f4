"""How much memory does serving take, and how much of the cache that running rows hold do they use?

    python -m bench.memory [--model ...] [--n 32] [--rounds 4]

A paged cache wastes less than one block a row, where a cache that reserves the longest length
wastes most of it. The peak should be the weights (of a tied embedding there are two copies), the
cache, and little more than importing torch takes; it should not grow from round to round. Reads
/proc, so it needs Linux."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.options import parser
from nva.bench import goal, open_model, random_workload, serve, show, stored_bytes

SLOTS_IN_USE = 0.93
EXTRA = 300  # MiB that the peak may have beside weights, cache and torch
# a request, about what it needs: all are written, since memory that is never touched is no memory
BLOCKS = 40
GROWTH = 16  # MiB over the second half of the rounds, that counts as none


def mebibytes(status: str, name: str) -> float:
    """A field of /proc/self/status: VmRSS is the memory in use, VmHWM its peak."""
    return int(status.split(f"{name}:")[1].split()[0]) / 1024


def own(name: str) -> float:
    return mebibytes(Path("/proc/self/status").read_text(), name)


def torch_alone() -> float:
    """MiB that a Python that has imported torch takes at its peak."""
    program = "import torch; print(open('/proc/self/status').read())"
    found = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return mebibytes(found.stdout, "VmHWM")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--n", type=int, default=32)
    options.add_argument("--rounds", type=int, default=6)
    args = options.parse_args()
    alone = torch_alone()
    engine = open_model(
        args.model, args.dtype, max_rows=args.n, max_model_len=1024, n_blocks=BLOCKS * args.n
    )
    reports, in_use = [], []
    for _ in range(args.rounds):
        reports.append(serve(engine, random_workload(0, args.n, (100, 512), (100, 512))))
        in_use.append(own("VmRSS"))
    embed, steps = engine.params["embed"].nbytes, reports[0].steps
    share = sum(step.slots_used for step in steps) / sum(step.slots_taken for step in steps)
    weights, cache = (
        stored_bytes(engine.params),
        sum(each.nbytes for layer in engine.kv.layers for each in layer),
    )
    growth = in_use[-1] - in_use[(args.rounds - 1) // 2]
    peak, wanted = own("VmHWM"), alone + EXTRA + (weights + cache) / 2**20
    figures = [
        ("slots in use", share, goal(share, at_least=SLOTS_IN_USE)),
        ("torch alone MiB", alone, "none"),
        ("weights MiB", weights / 2**20, "none"),
        ("of them a tied embedding's second copy MiB", embed / 2**20, "none"),
        ("cache MiB", cache / 2**20, "none"),
        ("peak MiB", peak, goal(peak, at_most=wanted)),
        ("growth over half the rounds MiB", growth, goal(growth, at_most=GROWTH)),
    ]
    rows = [dict(zip(("figure", "value", "goal"), each, strict=True)) for each in figures]
    show(f"memory, {engine.name}, {args.n} rows", rows, args.json)


if __name__ == "__main__":
    main()
