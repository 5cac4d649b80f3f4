"""The kernels of a CPU, compiled: what the C++ files beside this one compute, called on tensors.

The law is the contract's: reference.py's results up to rounding. float32 and bfloat16 are compiled;
float16, which CPUs are slow at, goes to the reference. Each call costs two or three microseconds,
so what a call needs is looked up once. Read next: linear.cpp, pointwise.cpp, experts.cpp and
attention.cpp, in this order; tape.py, which replays these calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from ctypes import c_bool, c_float, c_int64, c_void_p
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nva.kernels import Compute, Layout, reference
from nva.kernels.cpu.device import PLAIN
from nva.kernels.cpu.library import library
from nva.kernels.cpu.memory import on_huge_pages
from nva.kernels.cpu.tape import call, taped

_P, _N, _X, _B = c_void_p, c_int64, c_float, c_bool
_ARGUMENTS = {
    "pack": (_P, _P, _N, _N),
    "linear": (_P, _P, _P, _P, _N, _N, _N),
    "rms_norm": (_P, _N, _N, _P, _X, _B, _P, _N, _N),
    "add_rms_norm": (_P, _P, _P, _X, _B, _P, _P, _N, _N),
    "silu_mul": (_P, _P, _N, _N),
    "gelu_tanh_mul": (_P, _P, _N, _N),
    "moe": (_P, _P, _P, _P, _P, _P, _P, _P, _N, _N, _N, _N, _N, _B),
    "rotary": (_P, _N, _P, _N, _P, _P, _P, _P, _N, _N, _N, _N, _N),
    "write_kv": (_P, _N, _P, _N, _P, _P, _N, _N, _N, _P, _N),
    "attention": (_P, _N, _N, _P, _P, _N, _N, _N, _P, _N, _P, _P, _N, _X, _N, _P, _P),
}
_LIBRARY = library()
_LIBRARY.panel_width.restype = c_int64


def _bound(name: str, dtype: torch.dtype) -> Any:
    function = getattr(_LIBRARY, f"{name}_{str(dtype).removeprefix('torch.')}")
    function.argtypes, function.restype = _ARGUMENTS[name], None
    return function


_COMPILED = {
    name: {dtype: _bound(name, dtype) for dtype in (torch.float32, torch.bfloat16)}
    for name in _ARGUMENTS
}
_WIDTH = _LIBRARY.panel_width()


def _or_reference(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the compiled one for its first tensor's dtype; the reference's for a dtype
    without."""
    compiled_for, plain = _COMPILED[function.__name__], getattr(reference, function.__name__)

    @functools.wraps(function)
    def chosen(x: Tensor, *args: Any, **options: Any) -> Any:
        run = compiled_for.get(x.dtype)
        return plain(x, *args, **options) if run is None else function(run, x, *args, **options)

    return chosen


class Packed(NamedTuple):
    """A weight [N, K] in panels, or those of all experts [E, N, K]; see matmul.h."""

    panels: Tensor  # [panels of _WIDTH rows, numbers in a panel], or that for each expert
    n: int
    k: int

    @property
    def shape(self) -> tuple[int, ...]:
        """What it was before; K may have grown by one, to be even."""
        return *self.panels.shape[:-2], self.n, self.k


def pack_linear(weight: Tensor) -> Packed | Tensor:
    """A weight [.., N, K] in panels, as large as before but for rounding up. float16 stays as it
    is."""
    run = _COMPILED["pack"].get(weight.dtype)
    if run is None:
        return weight
    experts = weight if weight.dim() == 3 else weight[None]
    n_experts, n, k = experts.shape
    pair = 4 // weight.element_size()
    n_panels, k_packed = -(-n // _WIDTH), -(-k // pair) * pair
    panels = on_huge_pages(n_experts * n_panels, k_packed * _WIDTH, weight.dtype).view(
        n_experts, n_panels, -1
    )
    for place, expert in zip(panels, experts, strict=True):
        run(place.data_ptr(), expert.contiguous().data_ptr(), n, k)
    return Packed(panels if weight.dim() == 3 else panels[0], n, k_packed)


def linear(x: Tensor, weight: Packed | Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] -> [..., N]. A row of the result has the same bits whatever the other rows."""
    if not isinstance(weight, Packed):
        return reference.linear(x, weight, bias)
    panels, n, k = weight
    if x.shape[-1] != k:
        x = F.pad(x, (0, 1))
    x = x.contiguous()
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype)
    added = None if bias is None else bias.data_ptr()
    call(
        _COMPILED["linear"][x.dtype],
        x.data_ptr(),
        panels.data_ptr(),
        added,
        out.data_ptr(),
        out.numel() // n,
        n,
        k,
    )
    return out


@_or_reference
def rms_norm(run: Any, x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """x [..., H]: rounded to x's dtype before the weight, as in the reference."""
    size = x.shape[-1]
    if not (x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == size):
        x = x.contiguous()
    n_inner, stride = (x.shape[1], x.stride(0)) if x.dim() == 3 else (1, size)
    out = torch.empty(x.shape, dtype=x.dtype)
    inputs = x.data_ptr(), n_inner, stride, weight.data_ptr(), eps, unit_offset
    call(run, *inputs, out.data_ptr(), out.numel() // size, size)
    return out


@_or_reference
def add_rms_norm(
    run: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """(norm of x + residual, x + residual), x [..., H]."""
    x, residual, size = x.contiguous(), residual.contiguous(), x.shape[-1]
    out, total = torch.empty_like(x), torch.empty_like(x)
    inputs = x.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps, unit_offset
    call(run, *inputs, out.data_ptr(), total.data_ptr(), x.numel() // size, size)
    return out, total


@_or_reference
def silu_mul(run: Any, x: Tensor) -> Tensor:
    """[T, 2I] -> [T, I], rounded once."""
    return _gated(run, x)


@_or_reference
def gelu_tanh_mul(run: Any, x: Tensor) -> Tensor:
    """[T, 2I] -> [T, I], rounded once."""
    return _gated(run, x)


def _gated(run: Any, x: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype)
    call(run, x.data_ptr(), out.data_ptr(), *out.shape)
    return out


def moe(
    x: Tensor,
    logits: Tensor,
    gate_up: Packed | Tensor,
    down: Packed | Tensor,
    n_active: int,
    normalize: bool,
    is_padding: Tensor,
) -> Tensor:
    """x [T, H] -> [T, H]. A token's result has the same bits in every batch, on any number of
    threads."""
    if not (isinstance(gate_up, Packed) and isinstance(down, Packed)):
        return reference.moe(x, logits, gate_up, down, n_active, normalize, is_padding)
    x, logits, is_padding = x.contiguous(), logits.contiguous(), is_padding.contiguous()
    (n_tokens, hidden), (n_experts, n_gates, k) = x.shape, gate_up.shape
    gathered = torch.empty((n_tokens * n_active, k), dtype=x.dtype)
    inner = torch.empty((n_tokens * n_active, n_gates), dtype=x.dtype)
    out = torch.empty((n_tokens, hidden), dtype=x.dtype)
    inputs = (
        x.data_ptr(),
        logits.data_ptr(),
        gate_up.panels.data_ptr(),
        down.panels.data_ptr(),
        is_padding.data_ptr(),
    )
    places = gathered.data_ptr(), inner.data_ptr(), out.data_ptr()
    sizes = n_tokens, hidden, n_gates // 2, n_experts, n_active
    call(_COMPILED["moe"][x.dtype], *inputs, *places, *sizes, normalize)
    return out


@_or_reference
def rotary(run: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, Nq, D] and k [T, Nk, D], which may be parts of one tensor; rounded once."""
    (n_tokens, n_heads, size), n_kv_heads = q.shape, k.shape[1]
    q, k, cos, sin = _heads(q), _heads(k), cos.contiguous(), sin.contiguous()
    q_out = torch.empty((n_tokens, n_heads, size), dtype=q.dtype)
    k_out = torch.empty((n_tokens, n_kv_heads, size), dtype=q.dtype)
    inputs = q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), cos.data_ptr(), sin.data_ptr()
    call(
        run,
        *inputs,
        q_out.data_ptr(),
        k_out.data_ptr(),
        n_tokens,
        n_heads,
        n_kv_heads,
        size,
        cos.shape[1],
    )
    return q_out, k_out


def _heads(x: Tensor) -> Tensor:
    """[T, heads, D] with each token's numbers side by side, copied only if they aren't."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _is_compiled_for(cache: Tensor) -> bool:
    """Whether this cache has the compiled layout (attention.h): float32 or bfloat16, and an even
    head_dim. All other caches are the reference's, in its own layout."""
    return cache.dtype in _COMPILED["attention"] and cache.shape[-1] % 2 == 0


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """k, v [T, Nk, D] into the caches, in place."""
    if not _is_compiled_for(k_cache):
        return reference.write_kv(k, v, k_cache, v_cache, slots)
    k, v, run = _heads(k), _heads(v), _COMPILED["write_kv"][k.dtype]
    caches = k_cache.data_ptr(), v_cache.data_ptr(), *k_cache.shape[1:]
    return call(
        run, k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), *caches, slots.data_ptr(), len(k)
    )


class Inputs(NamedTuple):
    """The rows of a step as C sees them, and the arrays that the addresses point into."""

    arguments: tuple[int, ...]  # of attention(), from block_tables to n_rows
    arrays: tuple[Any, ...]


def attention_inputs(host: Layout, on_device: Layout, k_cache: Tensor) -> Any:
    """The rows' addresses. Tables get few widths, because a tape is made for each."""
    if not _is_compiled_for(k_cache):
        return reference.attention_inputs(host, on_device, k_cache)
    n_rows, width = host.block_tables.shape
    tables = np.zeros((n_rows, 1 << (width - 1).bit_length()), np.int32)
    tables[:, :width] = host.block_tables
    return _inputs(
        (
            tables,
            *(
                np.ascontiguousarray(each, np.int32)
                for each in (host.query_ends, host.context_lens)
            ),
        )
    )


def _inputs(arrays: tuple[np.ndarray, ...]) -> Inputs:
    tables, ends, lengths = arrays
    return Inputs(
        (tables.ctypes.data, tables.shape[1], ends.ctypes.data, lengths.ctypes.data, len(ends)),
        arrays,
    )


def compiled(compute: Compute) -> Compute:
    """The function, on a tape for each small shape."""
    return taped(compute, _step_arrays, _with_arrays)


_STEP = ("token_ids", "positions", "slots", "logit_index", "is_padding")


def _step_arrays(inputs: Any) -> tuple[np.ndarray, ...] | None:
    """What differs between steps of one shape; None where the reference computes, or an image comes
    in."""
    if not isinstance(inputs.attention, Inputs) or inputs.features is not None:
        return None
    tensors = [getattr(inputs, name) for name in _STEP]
    return (*inputs.attention.arrays, *(tensor.numpy() for tensor in tensors if tensor is not None))


def _with_arrays(inputs: Any, arrays: Sequence[np.ndarray]) -> Any:
    """The inputs with other arrays in their place."""
    names = [name for name in _STEP if getattr(inputs, name) is not None]
    tensors = {name: torch.from_numpy(array) for name, array in zip(names, arrays[3:], strict=True)}
    return attrs.evolve(inputs, attention=_inputs(tuple(arrays[:3])), **tensors)


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    inputs: Any,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [T, Nq, D] -> [T, Nq, D]. A row's result has the same bits in every batch, on any number of
    threads."""
    if not isinstance(inputs, Inputs):
        return reference.attention(q, k_cache, v_cache, inputs, scale, window, sinks)
    run = _COMPILED["attention"][q.dtype]
    q, sinks = _heads(q), None if sinks is None else sinks.float().contiguous()
    out = torch.empty(q.shape, dtype=q.dtype)
    caches = k_cache.data_ptr(), v_cache.data_ptr(), *k_cache.shape[1:]
    at_sinks = None if sinks is None else sinks.data_ptr()
    queries = q.data_ptr(), q.stride(0), q.shape[1]
    call(run, *queries, *caches, *inputs.arguments, scale, window or 0, at_sinks, out.data_ptr())
    return out


KERNELS = attrs.evolve(
    reference.KERNELS,
    pack_linear=pack_linear,
    linear=linear,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    silu_mul=silu_mul,
    gelu_tanh_mul=gelu_tanh_mul,
    moe=moe,
    rotary=rotary,
    write_kv=write_kv,
    attention_inputs=attention_inputs,
    attention=attention,
)
COMPILED = attrs.evolve(PLAIN, kernels=KERNELS, compiled=compiled)
"""A CPU with the compiled kernels, and its steps on tape."""
