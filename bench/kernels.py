"""How near does each kernel come to the machine's limits?

    python -m bench.kernels [--dtype bfloat16]

Kernels that read much are held against the bandwidth of a plain read, those that compute much
against torch's own product of large matrices, both measured just before. Shapes are those of
Qwen3-0.6B; those of experts Qwen3-30B-A3B's, with 32 of its 128. What is wanted is a share of the
bandwidth, for many rows that decode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from bench.options import parser
from nva.bench import bandwidth, best, goal, matmul_limit, show
from nva.forward import empty_cache
from nva.kernels import Layout, backend

HIDDEN, INNER, N_HEADS, N_KV_HEADS, HEAD_DIM = 1024, 3072, 16, 8, 128
MOE_HIDDEN, MOE_INNER, N_EXPERTS, N_ACTIVE = 2048, 768, 32, 8
DECODE, DECODE_RAGGED = (
    "attention, 32 x 1 queries over 1024",
    "attention, 32 x 1 over ragged lengths",
)
PERCENT_OF_A_READ = {DECODE: 70, DECODE_RAGGED: 70}  # wanted
Case = tuple[str, Callable[[], Any], float, float]
"""A name, what to run, the bytes it reads and writes, and the operations it does."""


def cases(kernels: Any, dtype: torch.dtype) -> Iterator[Case]:
    size = dtype.itemsize
    weights = [
        torch.randn(2 * INNER, HIDDEN).to(dtype) for _ in range(8)
    ]  # more than any cache holds
    packed = [kernels.pack_linear(weight) for weight in weights]
    for m in (1, 8, 32, 256, 2048):
        x = torch.randn(m, HIDDEN).to(dtype)
        read, work = 8 * weights[0].nbytes, 8 * 2.0 * m * weights[0].numel()
        yield (
            f"linear, {m} rows",
            lambda x=x: [kernels.linear(x, weight) for weight in packed],
            read,
            work,
        )
    for n_rows, n_queries, length in ((1, 1, 4096), (32, 1, 1024), (1, 2048, 2048)):
        run, read, work = attention(kernels, dtype, np.full(n_rows, length), n_queries)
        yield f"attention, {n_rows} x {n_queries} queries over {length}", run, read, work
    run, read, work = attention(kernels, dtype, np.random.default_rng(0).integers(16, 2048, 32), 1)
    yield DECODE_RAGGED, run, read, work
    yield from moe(kernels, dtype)
    x, weight = torch.randn(2048, HIDDEN).to(dtype), torch.ones(HIDDEN, dtype=dtype)
    yield (
        "add_rms_norm, 2048 rows",
        lambda: kernels.add_rms_norm(x, x, weight, 1e-6),
        4.0 * x.numel() * size,
        0,
    )
    gates = torch.randn(2048, 2 * INNER).to(dtype)
    yield "silu_mul, 2048 rows", lambda: kernels.silu_mul(gates), 1.5 * gates.numel() * size, 0


def moe(kernels: Any, dtype: torch.dtype) -> Iterator[Case]:
    """Tokens that decode, each expert that one of them needs being read once, and a prompt."""
    shapes = (N_EXPERTS, 2 * MOE_INNER, MOE_HIDDEN), (N_EXPERTS, MOE_HIDDEN, MOE_INNER)
    gate_up, down = (kernels.pack_linear((torch.randn(shape) / 32).to(dtype)) for shape in shapes)
    expert_size = 3 * MOE_INNER * MOE_HIDDEN
    for n in (1, 8, 32, 2048):
        x, logits = torch.randn(n, MOE_HIDDEN).to(dtype), torch.randn(n, N_EXPERTS).to(dtype)
        n_read = len(logits.topk(N_ACTIVE).indices.unique())
        inputs = x, logits, gate_up, down, N_ACTIVE, True, torch.zeros(n, dtype=torch.bool)
        read, work = float(n_read * expert_size * dtype.itemsize), 2.0 * n * N_ACTIVE * expert_size
        yield f"moe, {n} tokens", lambda inputs=inputs: kernels.moe(*inputs), read, work


def attention(
    kernels: Any, dtype: torch.dtype, lengths: Any, n_queries: int
) -> tuple[Callable[[], Any], float, float]:
    n_blocks = -(-lengths // 16)
    ids = np.random.default_rng(0).permutation(int(n_blocks.sum())).astype(np.int32)
    tables = np.zeros((len(lengths), int(n_blocks.max())), np.int32)
    for row, owned in enumerate(np.split(ids, np.cumsum(n_blocks)[:-1])):
        tables[row, : len(owned)] = owned
    shape = (len(ids), 16, N_KV_HEADS, HEAD_DIM)
    caches = [
        [empty_cache(shape, dtype, torch.device("cpu")).normal_() for _ in "kv"] for _ in range(2)
    ]
    q = torch.randn(len(lengths) * n_queries, N_HEADS, HEAD_DIM).to(dtype)
    ends = (np.arange(1, len(lengths) + 1) * n_queries).astype(np.int32)
    host = Layout(block_tables=tables, query_ends=ends, context_lens=lengths.astype(np.int32))
    device = Layout(
        **{
            name: torch.from_numpy(getattr(host, name))
            for name in ("block_tables", "query_ends", "context_lens")
        }
    )
    inputs = kernels.attention_inputs(host, device, caches[0][0])
    n_pairs = float(n_queries * (lengths - (n_queries - 1) / 2).sum())
    read = 2 * 2.0 * lengths.sum() * N_KV_HEADS * HEAD_DIM * dtype.itemsize

    def run() -> None:
        for cache in caches:
            kernels.attention(q, *cache, inputs, HEAD_DIM**-0.5)

    return run, read, 2 * 4.0 * n_pairs * N_HEADS * HEAD_DIM


def main() -> None:
    args = parser(__doc__).parse_args()
    dtype, rows = getattr(torch, args.dtype), []
    for name, run, n_bytes, n_operations in cases(backend("cpu"), dtype):
        read, compute = bandwidth(), matmul_limit(dtype)
        seconds = best(run)
        of_a_read = 100 * n_bytes / seconds / read
        rows.append(
            {
                "kernel": name,
                "ms": seconds * 1e3,
                "GB/s": n_bytes / seconds / 1e9,
                "% of a read": of_a_read,
                "GFLOP/s": n_operations / seconds / 1e9,
                "% of a matmul": 100 * n_operations / seconds / compute,
                "goal": goal(of_a_read, at_least=PERCENT_OF_A_READ.get(name)),
            }
        )
    show(f"kernels, {args.dtype}", rows, args.json)


if __name__ == "__main__":
    main()
