"""What does a prefix that many requests share cost, when all of them arrive together?

    python -m bench.prefix [--model ...] [--n 8 16 32] [--shared 1024] [--own 32] [--output 32]

Time should grow with the unique tokens only: each is computed once, and costs no more the more requests share it.
Beside it, the same requests with the prefix cache off.
"""

from __future__ import annotations

from typing import Any

from bench.options import parser
from nva.bench import goal, open_model, serve, shared_workload, show
from nva.load import Engine


def measure(engine: Engine, n: int, shared: int, own: int, output: int) -> dict[str, Any]:
    """One row: n requests, and the tokens that had to be computed against those that were. The last isn't computed."""
    n_unique = shared + n * (own + output - 1)
    serve(engine, shared_workload(4, n, shared, own, 2))  # warms up
    report = serve(engine, shared_workload(3, n, shared, own, output))
    return {
        "requests": n,
        "prefix cache": engine.state.limits.prefix_caching,
        "unique tokens": n_unique,
        "computed": sum(step.n_tokens for step in report.steps),
        "seconds": report.seconds,
        "ms per unique token": report.seconds / n_unique * 1e3,
        "host share": report.host_share,
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--n", type=int, nargs="+", default=[8, 16, 32])
    for name, default in (("shared", 1024), ("own", 32), ("output", 32)):
        options.add_argument(f"--{name}", type=int, default=default)
    args = options.parse_args()
    sizes, most = (args.shared, args.own, args.output), max(args.n)
    rows = []
    for is_cached, counts in ((True, args.n), (False, [most])):
        engine = open_model(args.model, args.dtype, max_rows=most, max_model_len=sum(sizes), prefix_caching=is_cached)
        rows += [measure(engine, n, *sizes) for n in counts]
    for row in rows:
        is_cached = row["prefix cache"]
        row["goal: computed"] = goal(row["computed"], at_most=row["unique tokens"] if is_cached else None)
        slowest = 1.1 * rows[0]["ms per unique token"] if is_cached else None
        row["goal: ms per token"] = goal(row["ms per unique token"], at_most=slowest)
    show(f"shared prefix, {engine.name}", rows, args.json)


if __name__ == "__main__":
    main()
