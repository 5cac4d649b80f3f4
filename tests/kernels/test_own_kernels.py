"""Kernels of one's own: they serve, or it is said at load why they can't."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

import nva
from nva.kernels import Kernels, Layout, reference, with_kernels
from nva.kernels.cpu.device import PLAIN
from nva.kernels.cpu.operators import COMPILED, Inputs
from nva.loading.check import self_check
from tests.npu.models import tiny_spec

SPEC = tiny_spec("qwen2 moe")
SMALL = {"dtype": "float32", "max_model_len": 64, "max_rows": 4, "n_blocks": 16}
FUNCTIONS = [field.name for field in attrs.fields(Kernels) if field.name != "is_approximate"]
OTHER_LAYOUT = {"write_kv", "attention_inputs", "attention", "linear", "moe"}
"""Those that agree with others of the compiled kernels on how numbers lie."""


def check(**functions: Any) -> None:
    """What a load does with the CPU's kernels, some replaced."""
    kernels = attrs.evolve(COMPILED.kernels, **functions)
    for dtype in (torch.float32, torch.bfloat16):
        self_check(SPEC, with_kernels(COMPILED, kernels), dtype)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_alone_by_the_references_serves_or_is_refused(name: str) -> None:
    """None computes something else in silence."""
    one = {name: getattr(reference.KERNELS, name)}
    if name not in OTHER_LAYOUT:
        return check(**one)
    with pytest.raises(nva.DeviceError, match="attention_inputs and attention agree"):
        check(**one)
    return None


def test_together_they_serve() -> None:
    names = ("write_kv", "attention_inputs", "attention")
    check(**{name: getattr(reference.KERNELS, name) for name in names})
    names = ("pack_linear", "linear", "moe")
    check(**{name: getattr(reference.KERNELS, name) for name in names})


def plain_attention(
    q: Any, k_cache: Any, v_cache: Any, rows: Layout, scale: float, *_: Any
) -> torch.Tensor:
    """Each row by itself, over keys that lie in the cache as they are written, without a window."""
    out, start = torch.empty_like(q), 0
    n_shared = q.shape[1] // k_cache.shape[2]
    for table, end, n in zip(rows.block_tables, rows.query_ends, rows.context_lens, strict=True):
        k, v = (cache[table.long()].flatten(0, 1)[:n].float() for cache in (k_cache, v_cache))
        k, v = (x.repeat_interleave(n_shared, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[start:end].float() * scale, k)
        n_queries = int(end - start)
        unseen = torch.ones(n_queries, int(n), dtype=torch.bool).triu(int(n) - n_queries + 1)
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
        start = int(end)
    return out


def test_an_attention_of_ones_own_brings_what_it_shares_the_cache_with() -> None:
    """Its inputs are then what one likes: here the rows as they are."""
    check(
        write_kv=reference.write_kv,
        attention_inputs=lambda host, on_device, k_cache: on_device,
        attention=plain_attention,
    )


def test_an_attention_alone_that_reads_the_compiled_cache_is_refused() -> None:
    """It is right, but keys lie otherwise than it reads them, which nothing else would tell."""

    def attention(q: Any, k_cache: Any, v_cache: Any, inputs: Inputs, *rest: Any) -> Any:
        rows = Layout(
            **dict(zip(attrs.fields_dict(Layout), map(torch.tensor, inputs.arrays), strict=True))
        )
        return plain_attention(q, k_cache, v_cache, rows, *rest)

    with pytest.raises(nva.DeviceError, match="standard deviations off.*replaced together"):
        check(attention=attention)


def question(engine: nva.Engine) -> str:
    params = nva.SamplingParams(temperature=0, max_tokens=5)
    return nva.generate(engine, ["The capital of France is"], params)[0].text


def test_a_kernel_of_ones_own_serves(demo_model) -> None:
    called = []

    def rotary(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        called.append(len(q))
        return reference.rotary(q, k, cos, sin)

    engine = nva.load(demo_model, kernels=lambda own: attrs.evolve(own, rotary=rotary), **SMALL)
    called.clear()
    assert question(engine) == " Paris.\n\nThe"
    assert called


def test_a_record_of_kernels_serves(demo_model) -> None:
    assert question(nva.load(demo_model, kernels=reference.KERNELS, **SMALL)) == " Paris.\n\nThe"


def test_what_is_not_the_references_is_refused_unless_it_is_meant(demo_model) -> None:
    def halved(own: Kernels) -> Kernels:
        return attrs.evolve(own, silu_mul=lambda x: reference.silu_mul(x) / 2)

    with pytest.raises(
        nva.DeviceError, match="is_approximate=True says that a difference is meant"
    ):
        nva.load(demo_model, kernels=halved, **SMALL)
    engine = nva.load(
        demo_model, kernels=lambda own: attrs.evolve(halved(own), is_approximate=True), **SMALL
    )
    assert question(engine)


@pytest.mark.parametrize(
    "kernels", [5, reference, PLAIN, lambda own: None], ids=["5", "module", "device", "nothing"]
)
def test_what_is_no_record_of_kernels_is_refused(demo_model, kernels: Any) -> None:
    with pytest.raises(
        ValueError, match="kernels is .*; give a nva.kernels.Kernels, or a function"
    ):
        nva.load(demo_model, kernels=kernels, **SMALL)
