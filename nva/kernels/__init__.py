"""What a device computes, `Kernels`, and how it is used, `Device`: two records of functions.

The law: a backend gives the results of reference.py, up to rounding, for every input that the
contract admits. Keys and values lie in paged caches [n_ids, block_size, Nk, D], one pair per
layer; a slot is block * block_size + offset, and how numbers lie within a block is the backend's
own affair. A backend that lacks a function fails when it is imported; a variant of one is
`attrs.evolve(kernels, rotary=mine)`. Read next: reference.py, the specification;
models/decoder.py, which calls these functions."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import attrs

if TYPE_CHECKING:  # the graph modes are asked by `nva doctor`, which runs without torch
    import torch
    from torch import Tensor

GRAPHS = ("auto", "eager", "ge", "aclgraph")
"""How an NPU runs the forward; other devices know "auto" and "eager". "auto" tries the others from
the last to the first."""

Compute = Callable[[Any, Any, Any], "Tensor"]
"""`compute(params, caches, inputs)`: what a device may compile."""

Filter = Callable[["Tensor", Any], None]
"""`filter_gaps(gaps, params)` of the sampler, in place."""

Buckets = tuple[tuple[int, ...], tuple[int, ...]]
"""The padded sizes of T and of B."""


@attrs.frozen(kw_only=True)
class Layout:
    """How B rows lie in T packed tokens and in the cache: numpy int32 arrays on the host, tensors
    on the device."""

    block_tables: Any
    """[B, M] block ids; entries that no token uses are arbitrary."""

    query_ends: Any
    """[B] inclusive running sum of query lengths, the last equals T; a length may be 0."""

    context_lens: Any
    """[B] tokens of the row in the cache, this step's queries being the last of them."""


class _Linear(Protocol):
    def __call__(self, x: Tensor, weight: Any, bias: Tensor | None = None, /) -> Tensor: ...


class _Norm(Protocol):
    def __call__(
        self, x: Tensor, weight: Any, eps: float, unit_offset: bool = False, /
    ) -> Tensor: ...


class _AddNorm(Protocol):
    def __call__(
        self, x: Tensor, residual: Tensor, weight: Any, eps: float, unit_offset: bool = False, /
    ) -> tuple[Tensor, Tensor]: ...


class _Moe(Protocol):
    def __call__(
        self,
        x: Tensor,
        logits: Tensor,
        gate_up: Any,
        down: Any,
        n_active: int,
        normalize: bool,
        is_padding: Tensor,
        /,
    ) -> Tensor: ...


class _Rotary(Protocol):
    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, /
    ) -> tuple[Tensor, Tensor]: ...


class _WriteKV(Protocol):
    def __call__(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, /
    ) -> None: ...


class _CopyBlocks(Protocol):
    def __call__(self, k_cache: Tensor, v_cache: Tensor, copies: Tensor, /) -> None: ...


class _AttentionInputs(Protocol):
    def __call__(self, host: Layout, on_device: Layout, k_cache: Tensor, /) -> Any: ...


class _Attention(Protocol):
    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        inputs: Any,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
        /,
    ) -> Tensor: ...


class _VisionAttention(Protocol):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, /) -> Tensor: ...


@attrs.frozen(kw_only=True)
class Kernels:
    """What is computed. T tokens, B rows, H hidden, I intermediate, Nq query and Nk key-value
    heads of D, E experts of J.

    `write_kv`, `copy_blocks`, `attention_inputs` and `attention` agree on how numbers lie in the
    cache, so they are replaced together; so are `pack_linear`, `linear` and `moe`, which agree on
    weights, and `pack_norm` and the two norms."""

    pack_linear: Callable[[Tensor], Any]
    """The form in which `linear` wants a weight [N, K], or `moe` those of all experts [E, N, K].
    Called once, when a model loads."""

    linear: _Linear
    """x [..., K] times the transpose of the packed weight [N, K], plus bias [N]."""

    pack_norm: Callable[[Tensor, bool], Any]
    """The form in which the norms want a weight [H] that they are told to have a unit offset, or
    not. Called once, when a model loads."""

    rms_norm: _Norm
    """x [..., H] over its root mean square, times the packed weight [H], or 1 + weight for a unit
    offset."""

    add_rms_norm: _AddNorm
    """(rms_norm(x + residual), x + residual)."""

    silu_mul: Callable[[Tensor], Tensor]
    """silu(gate) * up for x [T, 2I] = (gate, up)."""

    gelu_tanh_mul: Callable[[Tensor], Tensor]
    """gelu(gate) * up in the same form, with the tanh approximation of gelu."""

    moe: _Moe
    """Each token of x [T, H] through the n_active likeliest of E experts by router logits [T, E],
    weighted, summed.

    Weights are the softmax over all experts, in float32, over the sum of those chosen if
    `normalize`, then rounded to x's dtype. Expert e is down[e] silu_mul(gate_up[e] x), packed from
    [E, H, J] and [E, 2J, H]. Tokens that are padding, is_padding [T] bool, reach no expert, be
    they NaN, and what they get is arbitrary. How many tokens an expert gets changes no shape: a
    graph holds for every routing."""

    rotary: _Rotary
    """Rotate the first R numbers of every head of q [T, Nq, D] and k [T, Nk, D]; cos and sin are
    [T, R]."""

    write_kv: _WriteKV
    """Store k, v [T, Nk, D] at slots [T], all distinct, in place."""

    copy_blocks: _CopyBlocks
    """Copy blocks [C, 2] (from, to) in place; all are read before any is written."""

    attention_inputs: _AttentionInputs
    """Whatever `attention` wants to know about this step: called once, before the layers, which
    all share it. Both layouts hold the same numbers, so a backend takes host lists or device
    tensors as its operator demands."""

    attention: _Attention
    """Causal attention of q [T, Nq, D] over each row's own cache, in q's shape and dtype; the
    softmax is float32.

    Query i of a row's n sits at position context_len - n + i and sees the last `window` positions,
    itself included (all of them for None). Query head h reads key-value head h // (Nq / Nk).
    `sinks` [Nq] are logits that take part in the softmax's sum only. Cached values that a row
    doesn't own or see never reach it, be they NaN."""

    vision_attention: _VisionAttention
    """Attention of q, k, v [P, N, D] in which every one of P patches sees all; the softmax is
    float32, and memory grows with P, not with P squared."""

    is_approximate: bool = False
    """Whether results are meant to differ from the reference's. Kernels that are not the device's
    own are compared with the reference when a model loads, unless they say so here."""


@attrs.frozen(kw_only=True)
class Device:
    """How a device is used: where tensors live, what it wants of shapes and memory, its kernels."""

    name: str
    """What messages call it: cpu, cuda, npu."""

    where: torch.device
    """The device on which tensors live, made ready."""

    kernels: Kernels

    dtypes: tuple[torch.dtype, ...]
    """Types of weights and caches that the device computes with."""

    block_size: int
    """Tokens of a KV block, unless the user asks for another size."""

    empty_cache: Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]
    """Zeros [n_ids, block_size, Nk, D] for the keys, or the values, of one layer."""

    cache_bytes: Callable[[tuple[int, ...], torch.dtype], int]
    """Bytes that `empty_cache` takes for a shape and a dtype."""

    cache_memory: Callable[[torch.device], int]
    """Bytes of the device's memory that the cache may take when nobody says how many."""

    buckets: Callable[[int, int, int], Buckets]
    """The padded sizes of T and of B for (max_batched_tokens, max_rows, max_model_len); none where
    every shape is as good as another. Each is run once before the first request."""

    compiled: Callable[[Compute], Compute]
    """`compute(params, caches, inputs)` in the form that runs fastest: itself, or compiled for each
    shape."""

    make_filter_gaps: Callable[[Filter], Filter]
    """The sampler's filter: the general one that is given, or one that keeps the same tokens by an
    operator of the device's own."""

    is_checked: bool
    """Whether the kernels are compared with the reference before the first request."""

    measured_with: Kernels | None
    """Kernels for running the largest step once, operator by operator, before `cache_memory` is
    asked, so that what a step needs is counted; None where the cache takes a part of what is
    free."""

    pins_memory: bool
    """Whether copies to the device start from page-locked memory of the host."""

    is_host: bool
    """Whether tensors lie in the host's own memory, where numpy can work on them as they are."""


def no_buckets(max_batched_tokens: int, max_rows: int, max_model_len: int) -> Buckets:
    """For a device on which nothing is compiled for a shape."""
    return (), ()


def uncompiled(compute: Compute) -> Compute:
    """The function itself."""
    return compute


def general_filter(general: Filter) -> Filter:
    """The sampler's own filter."""
    return general


def plain_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Of numbers side by side."""
    return math.prod(shape) * dtype.itemsize


_BACKENDS = ("npu", "cuda", "cpu")
"""Packages and modules beside this one, the best first. Each has `is_here()` and `choose()`."""


def backend(name: str, heads: Any = None, graph: str = "auto") -> Device:
    """A device by its name ("cpu", "cuda:1", "auto" for the best one here), imported when asked for
    and made ready. How an NPU is used depends on the model's heads (a ModelSpec) and on the graph
    mode.

    Raises ValueError for a device that isn't here, and for a graph mode that it can't run.
    """
    modules = {kind: f"{__name__}.{kind}" for kind in _BACKENDS}
    if name == "auto":
        name = next(kind for kind in _BACKENDS if importlib.import_module(modules[kind]).is_here())
    if not re.fullmatch(r"cpu|(cuda|npu)(:[0-9]+)?", name):
        raise ValueError(
            f"device is {name!r}; give cpu, cuda, npu, cuda:1, npu:1, ..., or auto for the best "
            "one here"
        )
    return importlib.import_module(modules[name.partition(":")[0]]).choose(name, heads, graph)


def refuse_graph(name: str, graph: str) -> None:
    """Raise ValueError for a graph mode on a device that has none."""
    if graph not in ("auto", "eager"):
        raise ValueError(f"graph={graph!r} is for device npu; on {name} leave it at auto")


Change = Callable[[Kernels], Kernels]
"""What a user makes of a device's kernels: `lambda kernels: attrs.evolve(kernels, rotary=mine)`."""


def with_kernels(device: Device, kernels: Kernels | Change) -> Device:
    """The device with these kernels, or with what the function makes of its own.

    They are compared with the reference when a model loads, unless they are approximate. Raises
    ValueError where they aren't a record of kernels.
    """
    is_change = callable(kernels)
    changed = kernels(device.kernels) if is_change else kernels
    if not isinstance(changed, Kernels):
        raise ValueError(
            f"kernels is {kernels!r}{f', which returned {changed!r}' if is_change else ''}; give a "
            "nva.kernels.Kernels, or a function that makes one of the device's own: "
            "lambda kernels: attrs.evolve(kernels, rotary=mine)"
        )
    measured_with = device.measured_with
    if measured_with and is_change:
        measured_with = kernels(measured_with)
    return attrs.evolve(
        device,
        kernels=changed,
        measured_with=measured_with,
        is_checked=not changed.is_approximate,
    )
