"""What the device computes: one module per backend, all with the functions of `Kernels`.

The law: a backend gives the results of reference.py, up to rounding, for every input that the
contract admits. Keys and values live in paged caches [n_ids, block_size, Nk, D], one pair per
layer; a slot is block * block_size + offset, and how numbers lie within a block is the backend's
own affair. Read next: reference.py, the specification; models/decoder.py, which calls these
functions."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

import attrs

if TYPE_CHECKING:  # the command line asks for GRAPHS, and starts without torch
    from torch import Tensor, device, dtype

_BACKENDS = ("cpu", "cuda", "npu")
GRAPHS = ("auto", "eager", "ge", "aclgraph")
"""How an NPU runs the forward; other devices know "auto" and "eager"."""

Compute = Callable[[Any, Any, Any], "Tensor"]
Filter = Callable[["Tensor", Any], None]


@attrs.frozen(kw_only=True)
class Layout:
    """How B rows lie in T packed tokens and in the cache: numpy int32 arrays on the host, tensors
    on the device."""

    block_tables: Any  # [B, M] block ids; entries that no token uses are arbitrary
    query_ends: (
        Any  # [B] inclusive running sum of query lengths, the last equals T; a length may be 0
    )
    context_lens: (
        Any  # [B] tokens of the row in the cache, this step's queries being the last of them
    )


class Kernels(Protocol):
    """The contract of a backend. T tokens, B rows, H hidden, I intermediate, Nq query and Nk
    key-value heads of D, E experts of J."""

    block_size: int
    """Tokens of a KV block, unless the user asks for another size."""

    dtypes: tuple[dtype, ...]
    """Types of weights and caches that the device computes with."""

    def buckets(
        self, max_batched_tokens: int, max_rows: int, max_model_len: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The padded sizes of T and of B; none where every shape is as good as another."""
        ...

    def cache_memory(self, device: device) -> int:
        """Bytes of the device's memory that the cache may take when nobody says how many."""
        ...

    def make_filter_gaps(self, general: Filter) -> Filter:
        """The sampler's filter: `general`, or one that keeps the same tokens by an operator of the
        device's own."""
        ...

    def compiled(self, compute: Compute) -> Compute:
        """`compute(params, caches, inputs)` in the form that runs fastest: itself, or compiled for
        each shape."""
        ...

    def pack_linear(self, weight: Tensor) -> Any:
        """The form in which `linear` wants a weight [N, K], or `moe` those of all experts [E, N,
        K].

        Called once, when a model loads.
        """
        ...

    def pack_norm(self, weight: Tensor, unit_offset: bool) -> Any:
        """The form in which the norms want a weight [H] that they are told to have a unit offset,
        or not.

        Called once, when a model loads.
        """
        ...

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """x [..., K] times the transpose of the packed weight [N, K], plus bias [N]."""
        ...

    def rms_norm(self, x: Tensor, weight: Any, eps: float, unit_offset: bool = False) -> Tensor:
        """x [..., H] over its root mean square, times the packed weight [H], or 1 + weight for a
        unit offset."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Any, eps: float, unit_offset: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        ...

    def silu_mul(self, x: Tensor) -> Tensor:
        """silu(gate) * up for x [T, 2I] = (gate, up)."""
        ...

    def gelu_tanh_mul(self, x: Tensor) -> Tensor:
        """gelu(gate) * up in the same form, with the tanh approximation of gelu."""
        ...

    def moe(
        self,
        x: Tensor,
        logits: Tensor,
        gate_up: Any,
        down: Any,
        n_active: int,
        normalize: bool,
        is_padding: Tensor,
    ) -> Tensor:
        """Each token of x [T, H] through the n_active likeliest of E experts by router logits [T,
        E], weighted, summed.

        Weights are the softmax over all experts, in float32, over the sum of those chosen if
        `normalize`, then rounded to x's dtype. Expert e is down[e] silu_mul(gate_up[e] x), packed
        from [E, H, J] and [E, 2J, H]. Tokens that are padding, is_padding [T] bool, reach no
        expert, be they NaN, and what they get is arbitrary. How many tokens an expert gets changes
        no shape: a graph holds for every routing."""
        ...

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate the first R numbers of every head of q [T, Nq, D] and k [T, Nk, D]; cos and sin
        are [T, R]."""
        ...

    def write_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
    ) -> None:
        """Store k, v [T, Nk, D] at slots [T], all distinct, in place."""
        ...

    def copy_blocks(self, k_cache: Tensor, v_cache: Tensor, copies: Tensor) -> None:
        """Copy blocks [C, 2] (from, to) in place; all are read before any is written."""
        ...

    def attention_inputs(self, host: Layout, on_device: Layout, k_cache: Tensor) -> Any:
        """Whatever `attention` wants to know about this step: called once, before the layers, which
        all share it.

        Both layouts hold the same numbers, so a backend takes host lists or device tensors as its
        operator demands."""
        ...

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        inputs: Any,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of q [T, Nq, D] over each row's own cache, in q's shape and dtype; the
        softmax is float32.

        Query i of a row's n sits at position context_len - n + i and sees the last `window`
        positions, itself included (all of them for None). Query head h reads key-value head h //
        (Nq / Nk). `sinks` [Nq] are logits that take part in the softmax's sum only. Cached values
        that a row doesn't own or see never reach it, be they NaN."""
        ...

    def vision_attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of q, k, v [P, N, D] in which every one of P patches sees all; the softmax is
        float32."""
        ...


def backend(device_: str | device, heads: Any = None, graph: str = "auto") -> Kernels:
    """The kernels for a device, imported when asked for; an NPU's depend on the model's heads (a
    ModelSpec) and graph.

    Raises ValueError for a device without kernels, and for a graph mode that it can't run.
    """
    kind = str(device_).partition(":")[
        0
    ]  # a string: torch knows no "npu" before torch_npu is imported
    if kind == "npu":
        return importlib.import_module("nva.kernels.npu").choose(heads, graph)
    if kind not in _BACKENDS:
        raise ValueError(f"no kernels for device {kind!r}; choose one of {', '.join(_BACKENDS)}")
    if graph not in ("auto", "eager"):
        raise ValueError(f"graph={graph!r} is for device npu; on {kind} leave it at auto")
    if kind == "cpu":
        return importlib.import_module("nva.kernels.cpu").choose()
    return cast(Kernels, importlib.import_module("nva.kernels.reference"))


def place(device_: str | device) -> device:
    """The device on which tensors live, made ready."""
    if str(device_).partition(":")[0] == "npu":
        return importlib.import_module("nva.kernels.npu.device").place(str(device_))
    import torch

    return torch.device(device_)
