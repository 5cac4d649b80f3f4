"""How much faster is nva than another engine, on the same work, in the same minutes?

    python -m bench.peers.ratio [--peer transformers] [--model ...] [--only W2 W3] [--rounds 3]

The two take turns, because a machine's memory may be twice as fast one minute as the next; the ratio is of the least
times. W1: many requests of random lengths; W2: one stream; W3: one long prompt; W4: a prefix that all share.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from bench.options import parser
from nva.bench import SHAPES, Workload, bandwidth, open_model, random_workload, serve, shared_workload, show


def workloads(model: str | None) -> dict[str, Workload]:
    is_large = model in SHAPES
    many = (
        random_workload(0, 16, (100, 512), (100, 256)) if is_large else random_workload(0, 32, (100, 1024), (100, 1024))
    )
    return {
        "W1": many,
        "W2": random_workload(1, 1, (64, 64), (128, 128)),
        "W3": random_workload(100, 1, (2048, 2048), (1, 1)),
        "W4": shared_workload(3, 32, 1024, 32, 32),
    }


def seconds(name: str, times: tuple[float, float]) -> float:
    """The time that a workload is about: after the first token for one stream, else all of it."""
    first, whole = times
    return whole - first if name == "W2" else whole


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--peer", default="transformers", help="a module of bench.peers")
    options.add_argument("--peer-model", help="where the peer finds the model, if elsewhere")
    options.add_argument("--only", nargs="+", default=["W1", "W2", "W3", "W4"])
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    peer = importlib.import_module(f"bench.peers.{args.peer}").open_peer(args.peer_model or args.model, args.dtype)
    engine = open_model(args.model, args.dtype, max_rows=32, max_model_len=2304)

    def ours(workload: Workload) -> tuple[float, float]:
        report = serve(engine, workload)
        return min(report.first), report.seconds

    found, rows = workloads(args.model), []
    for name in args.only:
        sides: tuple[Callable[[Workload], tuple[float, float]], ...] = (ours, peer)
        times = [[seconds(name, side(found[name])) for side in sides] for _ in range(args.rounds)]
        mine, theirs = (min(column) for column in zip(*times, strict=True))
        rows.append({"workload": name, "nva s": mine, f"{args.peer} s": theirs, "ratio": theirs / mine})
        rows[-1]["bandwidth GB/s"] = bandwidth() / 1e9
    show(f"nva against {args.peer}, {engine.name}, {args.dtype}", rows, args.json)


if __name__ == "__main__":
    main()
