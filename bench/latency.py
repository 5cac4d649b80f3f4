"""How long does one user wait: for the first token, and for each after it?

    python -m bench.latency [--model ...] [--prompt 64] [--output 128]

Decoding reads all weights and the row's keys and values once a token, so the memory's bandwidth bounds it: it is
measured in the same minute, and the share of it that reading the weights took is printed.
"""

from __future__ import annotations

from bench.options import parser
from nva.bench import latency, open_model, random_workload, show


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--prompt", type=int, default=64)
    options.add_argument("--output", type=int, default=128)
    args = options.parse_args()
    engine = open_model(args.model, args.dtype, max_rows=1, max_model_len=args.prompt + args.output)
    workload = random_workload(1, 1, (args.prompt, args.prompt), (args.output, args.output))
    show("latency", [latency(engine, workload)], args.json)


if __name__ == "__main__":
    main()
