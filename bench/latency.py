"""How long does one user wait: for the first token of a long prompt, and for each token after it?

    python -m bench.latency [--model ...] [--prompt 64] [--output 128] [--long 2048]

Decoding reads all weights and the row's keys and values once a token, so the memory's bandwidth
bounds it; a long prompt is bound by the speed of products. Both limits are measured in the same
minute, and the share of them that was reached is printed."""

from __future__ import annotations

from typing import Any

from bench.options import parser
from nva.bench import (
    Workload,
    goal,
    latency,
    matmul_limit,
    open_model,
    prefill_operations,
    random_workload,
    serve,
    show,
)
from nva.engine import Engine
from nva.loading.find import DEMO_MODEL

DECODE_SHARE = {"qwen3-0.6b-shape": 0.85, DEMO_MODEL: 0.7}  # wanted, of the bandwidth
PREFILL_SHARE = {"qwen3-0.6b-shape": 0.85}  # wanted, of the limit of products


def prefill(engine: Engine, workload: Workload) -> dict[str, Any]:
    """Serve one prompt twice and tell of the second."""
    serve(engine, workload)
    limit, seconds = matmul_limit(engine.params["embed"].dtype), serve(engine, workload).first[0]
    n_tokens = len(workload.prompts[0])
    speed = prefill_operations(engine, n_tokens) / seconds
    return {
        "model": engine.name,
        "prompt": n_tokens,
        "first token ms": seconds * 1e3,
        "prompt tokens/s": n_tokens / seconds,
        "GFLOP/s": speed / 1e9,
        "limit": limit / 1e9,
        "share of it": speed / limit,
        "goal": goal(speed / limit, at_least=PREFILL_SHARE.get(engine.name)),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--prompt", type=int, default=64)
    options.add_argument("--output", type=int, default=128)
    options.add_argument("--long", type=int, default=2048, help="length of the long prompt")
    args = options.parse_args()
    longest = max(args.prompt + args.output, args.long + 1)
    engine = open_model(args.model, args.dtype, max_rows=1, max_model_len=longest)
    decode = latency(
        engine, random_workload(1, 1, (args.prompt, args.prompt), (args.output, args.output))
    )
    decode["goal"] = goal(decode["share of it"], at_least=DECODE_SHARE.get(engine.name))
    show("one stream", [decode], args.json)
    show(
        "one long prompt",
        [prefill(engine, random_workload(100, 1, (args.long, args.long), (1, 1)))],
    )


if __name__ == "__main__":
    main()
