"""How many tokens a second come out when many requests are served together?

    python -m bench.throughput [--model PATH | qwen3-0.6b-shape] [--n 32]
                        [--prompt 100 1024] [--output 100 1024]

Random prompts and answers, lengths and ids drawn with a fixed seed; all requests arrive at once.
"""

from __future__ import annotations

from bench.options import parser
from nva.bench import open_model, random_workload, show, throughput


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--n", type=int, default=32)
    options.add_argument("--prompt", type=int, nargs=2, default=(100, 1024))
    options.add_argument("--output", type=int, nargs=2, default=(100, 1024))
    args = options.parse_args()
    engine = open_model(
        args.model, args.dtype, max_rows=args.n, max_model_len=args.prompt[1] + args.output[1]
    )
    row = throughput(engine, random_workload(0, args.n, tuple(args.prompt), tuple(args.output)))
    show("throughput", [row], args.json)


if __name__ == "__main__":
    main()
