"""What does a prefix that many requests share cost?

    python -m bench.prefix [--model ...] [--n 32] [--shared 1024] [--own 32] [--output 32]

Time should grow with the unique tokens only, also when all requests arrive together. Beside it, the same requests with
the prefix cache off.
"""

from __future__ import annotations

from bench.options import parser
from nva.bench import open_model, serve, shared_workload, show


def main() -> None:
    options = parser(__doc__)
    for name, default in (("n", 32), ("shared", 1024), ("own", 32), ("output", 32)):
        options.add_argument(f"--{name}", type=int, default=default)
    args = options.parse_args()
    length = args.shared + args.own + args.output
    rows = []
    for is_cached in (True, False):
        engine = open_model(args.model, args.dtype, max_rows=args.n, max_model_len=length, prefix_caching=is_cached)
        report = serve(engine, shared_workload(3, args.n, args.shared, args.own, args.output))
        n_computed = sum(step.n_tokens for step in report.steps)
        rows.append({"prefix cache": is_cached, "seconds": report.seconds, "tokens computed": n_computed})
    show(f"shared prefix, {engine.name}", rows, args.json)


if __name__ == "__main__":
    main()
