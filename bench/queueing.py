"""Does a token cost the same however many requests wait for their turn?

    python -m bench.queueing [--model ...] [--requests 8 32 128 512] [--rows 8]
                      [--prompt 64] [--output 16]

A few rows run at once and the rest wait, so the model does the same work per token; what grows with
the number of requests would be the host's. The least of two rounds, since a machine's memory may be
slow for a minute."""

from __future__ import annotations

from bench.options import parser
from nva.bench import Report, goal, open_model, random_workload, serve, show

GROWTH = 1.1  # of the cost of a token, that counts as none


def us_per_token(reports: list[Report]) -> tuple[float, float]:
    """Microseconds that a token took in all, and of the host."""
    whole = min(report.seconds / report.n_total for report in reports)
    host = min(report.seconds * report.host_share / report.n_total for report in reports)
    return whole * 1e6, host * 1e6


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--requests", type=int, nargs="+", default=[8, 32, 128, 512])
    for name, default in (("rows", 8), ("prompt", 64), ("output", 16)):
        options.add_argument(f"--{name}", type=int, default=default)
    args = options.parse_args()
    engine = open_model(
        args.model, args.dtype, max_rows=args.rows, max_model_len=args.prompt + args.output
    )
    lengths = (args.prompt, args.prompt), (args.output, args.output)
    found = [
        [serve(engine, random_workload(0, n, *lengths)) for n in args.requests] for _ in range(2)
    ]
    costs = [us_per_token(list(reports)) for reports in zip(*found, strict=True)]
    rows = [
        {
            "requests": n,
            "us per token": whole,
            "of the host": host,
            "growth": whole / costs[0][0],
            "host's growth": host / costs[0][1],
            "goal": goal(max(whole / costs[0][0], host / costs[0][1]), at_most=GROWTH),
        }
        for n, (whole, host) in zip(args.requests, costs, strict=True)
    ]
    show(f"queueing, {engine.name}, {args.rows} rows", rows, args.json)


if __name__ == "__main__":
    main()
