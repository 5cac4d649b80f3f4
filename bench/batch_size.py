"""How does throughput grow with the number of rows that decode together?

python -m bench.batch_size [--model ...] [--rows 1 2 4 8 16 32 64 128 256] [--prompt 64] [--output
64]"""

from __future__ import annotations

from statistics import median

from bench.options import parser
from nva.bench import open_model, random_workload, serve, show


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    options.add_argument("--prompt", type=int, default=64)
    options.add_argument("--output", type=int, default=64)
    args = options.parse_args()
    most, length = max(args.rows), args.prompt + args.output
    engine = open_model(
        args.model,
        args.dtype,
        max_rows=most,
        max_model_len=length,
        n_blocks=most * (length // 16 + 1),
    )
    rows = []
    for n in args.rows:
        workload = random_workload(0, n, (args.prompt, args.prompt), (args.output, args.output))
        decode = [
            sum(step.seconds.values())
            for step in serve(engine, workload).steps
            if step.n_tokens == n
        ]
        rows.append(
            {"rows": n, "ms per step": median(decode) * 1e3, "tokens/s": n / median(decode)}
        )
    show(f"decode by batch size, {engine.name}", rows, args.json)


if __name__ == "__main__":
    main()
