"""What does a prefix that many requests share cost, when all of them arrive together?

    python -m bench.prefix [--model ...] [--n 8 16 32] [--shared 1024] [--own 32] [--output 32]

Time should grow with the unique tokens only: each is computed once, and a request more costs no
more than those before. Beside it, the same requests with the prefix cache off."""

from __future__ import annotations

from typing import Any

from bench.options import parser
from nva.bench import goal, open_model, serve, shared_workload, show
from nva.engine import Engine


def measure(engine: Engine, n: int, shared: int, own: int, output: int) -> dict[str, Any]:
    """One row: n requests, and the tokens that had to be computed against those that were. The last
    isn't computed."""
    n_unique = shared + n * (own + output - 1)
    serve(engine, shared_workload(4, n, shared, own, 2))  # warms up
    report = serve(engine, shared_workload(3, n, shared, own, output))
    return {
        "requests": n,
        "prefix cache": engine.state.limits.prefix_caching,
        "unique tokens": n_unique,
        "computed": sum(step.n_tokens for step in report.steps),
        "seconds": report.seconds,
        "host share": report.host_share,
    }


def with_goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of growing numbers of requests, with the cost of each added one: a tenth above those
    before is allowed."""
    found, before, limit = [], {"requests": 0, "seconds": 0.0}, None
    for row in rows:
        added = (row["seconds"] - before["seconds"]) / (row["requests"] - before["requests"]) * 1e3
        computed = goal(
            row["computed"], at_most=row["unique tokens"] if row["prefix cache"] else None
        )
        goals = {"goal: computed": computed, "goal: ms": goal(added, at_most=limit)}
        found.append({**row, "ms per added request": added, **goals})
        before, limit = row, 1.1 * added
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--n", type=int, nargs="+", default=[8, 16, 32])
    for name, default in (("shared", 1024), ("own", 32), ("output", 32)):
        options.add_argument(f"--{name}", type=int, default=default)
    args = options.parse_args()
    sizes, most = (args.shared, args.own, args.output), max(args.n)
    rows = []
    for is_cached, counts in ((True, sorted(args.n)), (False, [most])):
        engine = open_model(
            args.model,
            args.dtype,
            max_rows=most,
            max_model_len=sum(sizes),
            prefix_caching=is_cached,
        )
        rows += with_goals([measure(engine, n, *sizes) for n in counts])
    show(f"shared prefix, {engine.name}", rows, args.json)


if __name__ == "__main__":
    main()
