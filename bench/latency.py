"""How long does one user wait: for the first token, and for each after it?

    python -m bench.latency [--model ...] [--prompt 64] [--output 128]

Decoding reads all weights and the row's keys and values once a token, so the memory's bandwidth bounds it: it is
measured in the same minute, and the share of it that was reached is printed.
"""

from __future__ import annotations

from bench.options import parser
from nva.bench import bandwidth, open_model, random_workload, serve, show, weight_bytes


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--prompt", type=int, default=64)
    options.add_argument("--output", type=int, default=128)
    args = options.parse_args()
    engine = open_model(args.model, args.dtype, max_rows=1, max_model_len=args.prompt + args.output)
    workload = random_workload(1, 1, (args.prompt, args.prompt), (args.output, args.output))
    serve(engine, workload)
    limit, report = bandwidth(), serve(engine, workload)
    per_token = (report.last[0] - report.first[0]) / max(1, args.output - 1)
    row = {
        "model": engine.name,
        "first token ms": report.first[0] * 1e3,
        "ms per token": per_token * 1e3,
        "tokens/s": 1 / per_token,
        "prompt tokens/s": args.prompt / report.first[0],
        "bandwidth GB/s": limit / 1e9,
        "share of it": weight_bytes(engine) / per_token / limit,
        "host share": report.host_share,
    }
    show("latency", [row], args.json)


if __name__ == "__main__":
    main()
