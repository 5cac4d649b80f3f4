"""How much of the cache that running rows hold do they use?

    python -m bench.memory [--model ...] [--n 32]

A paged cache wastes less than one block a row, where a cache that reserves the longest length wastes most of it. Also
prints the process's peak memory beside the weights and the cache.
"""

from __future__ import annotations

import resource

from bench.options import parser
from nva.bench import open_model, random_workload, serve, show, weight_bytes


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--n", type=int, default=32)
    args = options.parse_args()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    engine = open_model(args.model, args.dtype, max_rows=args.n, max_model_len=1024)
    report = serve(engine, random_workload(0, args.n, (100, 512), (100, 512)))
    embed = engine.params["embed"].nbytes
    row = {
        "rows": args.n,
        "slots in use": sum(step.slots_used for step in report.steps) / sum(step.slots_taken for step in report.steps),
        "weights MiB": (weight_bytes(engine) + embed) / 2**20,
        "embedding MiB": embed / 2**20,
        "cache MiB": sum(tensor.nbytes for layer in engine.kv.layers for tensor in layer) / 2**20,
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "after import MiB": before,
    }
    show("memory", [row], args.json)


if __name__ == "__main__":
    main()
