"""How much speed is left on a machine that other programs use?

    python -m bench.busy [--model ...] [--peer transformers] [--python PYTHON] [--rounds 5]

Decodes four requests together beside 0 busy processes, one for every second core, one for every
core, and two. nva and the peer take turns within each round, and each ratio is of one side alone:
its speed beside busy processes over its speed without, the median of all rounds. A fair scheduler
leaves a half beside one busy process for every core. Spinning threads leave far less."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from bench.options import parser
from bench.peers.models import model_file
from bench.peers.protocol import n_cores, running
from bench.peers.ratio import FILES
from bench.workloads import shifted
from nva.bench import Workload, fitted, open_model, random_workload, serve, show

SETTLE = 0.3
"""Seconds in which the scheduler spreads new processes over the cores."""


@contextlib.contextmanager
def busy_processes(n: int) -> Iterator[None]:
    """n processes that compute without end beside this one."""
    command = [sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(command) for _ in range(n)]
    try:
        time.sleep(SETTLE)
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--peer", default="transformers", choices=FILES)
    options.add_argument(
        "--python", default=sys.executable, help="the command that starts the peer's Python"
    )
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--output", type=int, default=48, help="tokens of each answer")
    args = options.parse_args()
    path = str(model_file(args.model, FILES[args.peer]))
    engine = open_model(args.model, args.dtype, max_rows=4, max_model_len=512)
    vocab_size = engine.state.limits.vocab_size
    workload = fitted(random_workload(1, 4, (64, 64), (args.output, args.output)), vocab_size)
    counts = sorted({0, (n_cores() + 1) // 2, n_cores(), 2 * n_cores()})
    with running(args.python, f"bench.peers.{args.peer}", path, args.dtype) as peer:

        def theirs(round_: Workload) -> float:
            return peer(round_)[1]

        sides = {"nva": lambda round_: serve(engine, round_).seconds, args.peer: theirs}
        seconds = measured(sides, workload, vocab_size, counts, args.rounds)
    rows = [table_row(seconds, sides, n, 4 * args.output) for n in counts]
    show(f"beside busy processes, {n_cores()} cores", rows, args.json)


def measured(
    sides: dict[str, Any], workload: Workload, vocab_size: int, counts: list[int], n_rounds: int
) -> dict[tuple[str, int], list[float]]:
    """Seconds of each round, by side and number of busy processes."""
    found: dict[tuple[str, int], list[float]] = {(s, n): [] for s in sides for n in counts}
    for run in sides.values():  # once to warm up
        run(workload)
    for i in range(n_rounds):
        round_ = fitted(shifted(workload, i + 2), vocab_size)
        for n in counts:
            with busy_processes(n):
                for side, run in sides.items():
                    found[side, n].append(run(round_))
    return found


def table_row(
    seconds: dict[tuple[str, int], list[float]], sides: Any, n: int, n_tokens: int
) -> dict[str, Any]:
    row: dict[str, Any] = {"busy processes": n}
    for side in sides:
        row[f"{side} tokens/s"] = n_tokens / median(seconds[side, n])
        pairs = zip(seconds[side, 0], seconds[side, n], strict=True)
        row[f"{side} of quiet"] = median(quiet / busy for quiet, busy in pairs)
    return row


if __name__ == "__main__":
    main()
