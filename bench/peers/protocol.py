"""A peer runs in a Python of its own: a workload goes in and its times come out, a line of JSON
each.

The law: the peer's side imports its own library and nothing of nva, so that no versions clash, and
all that the library prints goes to stderr. A peer is a module with `open_peer(model, dtype)`, which
gives a function from prompts and lengths of answers to (seconds to the first token of all, seconds
in all, tokens that were asked for and came). Read next: transformers.py, the shortest peer;
ratio.py, which asks."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nva.bench import Workload

ROOT = Path(__file__).parents[2]
Serve = Callable[[list[list[int]], list[int]], tuple[float, float, int]]
"""What a peer's `open_peer` gives."""


@contextlib.contextmanager
def running(
    python: str, module: str, model: str, dtype: str
) -> Iterator[Callable[[Workload], tuple[float, float]]]:
    """A peer, started; the function asks it to serve a workload, and gives seconds to the first
    token and in all.

    Raises RuntimeError when the peer ends early or answers with fewer tokens than were asked for.
    """
    command = [*shlex.split(python), "-m", "bench.peers.protocol", module, model, dtype]
    environment = {**os.environ, "OMP_NUM_THREADS": str(n_cores())}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as peer:
        _answer(peer, module)
        yield lambda workload: _ask(peer, module, workload)


def _ask(peer: subprocess.Popen[str], module: str, workload: Workload) -> tuple[float, float]:
    assert peer.stdin is not None
    print(json.dumps([workload.prompts, workload.output_lens]), file=peer.stdin, flush=True)
    first, whole, n_output = _answer(peer, module)
    if n_output != sum(workload.output_lens):
        raise RuntimeError(
            f"{module} answered with {n_output} tokens where {sum(workload.output_lens)} were "
            "asked for"
        )
    return first, whole


def _answer(peer: subprocess.Popen[str], module: str) -> list[float]:
    assert peer.stdout is not None
    line = peer.stdout.readline()
    if not line:
        raise RuntimeError(f"{module} ended without an answer; what it printed above says why")
    return json.loads(line)


def n_cores() -> int:
    """Cores that this process may use, and so the threads of every side."""
    return len(os.sched_getaffinity(0))


def main(module: str, model: str, dtype: str) -> None:
    """The peer's side: open it, say so with an empty list, then answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    serve: Serve = importlib.import_module(module).open_peer(model, dtype)
    print(json.dumps([]), file=answers)
    for line in sys.stdin:
        print(json.dumps(serve(*json.loads(line))), file=answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
