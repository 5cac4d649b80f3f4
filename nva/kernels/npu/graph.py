"""Graph modes: how the same forward is compiled for an NPU, with the options that production wants.

The law: one graph per shape of the batch, and none for new lengths. The graph engine ("ge") gets
lengths as tensors, so its graphs are static. An ACL graph ("aclgraph") gets them as host integers,
which must be symbols, so its graphs are dynamic, with every tensor pinned to one shape. Each mode
imports its own compiler, since an installation may lack the other's. Read next: operators.py and
ge.py, the functions that are traced."""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import os
import pathlib
import types
import warnings
from typing import Any

import attrs
import torch
import torch._dynamo
import torch._functorch.config
import torch_npu
from torch import Tensor
from torch.utils import _pytree

from nva.host.messages import say
from nva.kernels import Compute, Kernels

SMALLEST_BUCKET = 16  # symbols of size 1 would make graphs of their own

CACHE_VARIABLE = "NVA_GRAPH_CACHE"

MAX_GRAPHS = 256
"""Shapes that may be compiled; torch's own limit of 8 would make the ninth an error."""


def buckets(
    max_batched_tokens: int, max_rows: int, max_model_len: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Few sizes, each four times the last: a shape costs a compilation, padding at most three
    quarters of a step.

    No gap between token buckets is wider than max_model_len, since one row holds all padding.
    """
    tokens = [min(SMALLEST_BUCKET, max_model_len)]
    rows = [SMALLEST_BUCKET + 1]
    while tokens[-1] < max_batched_tokens:
        tokens.append(min(max_batched_tokens, 4 * tokens[-1], tokens[-1] + max_model_len))
    while rows[-1] < max_rows + 1:
        rows.append(min(max_rows + 1, 4 * rows[-1]))
    return tuple(tokens), tuple(rows)


class Program(torch.nn.Module):
    """A function with its constants bound. It is a module because the compiler takes a module's
    integers for constants, and any other object's for symbols once lengths are symbols."""

    def __init__(self, compute: Compute, text: str = "") -> None:
        super().__init__()
        self.compute, self.text = compute, text

    def extra_repr(self) -> str:
        """What str() of the module shows."""
        return self.text

    def forward(self, params: Any, caches: Any, inputs: Any) -> Any:
        """What `compute` gives."""
        return self.compute(params, caches, inputs)


def ge_config() -> Any:
    """Options of the graph engine."""
    import torchair

    config = torchair.CompilerConfig()
    # Weights are constants of the graph, so that no run has to pass hundreds of inputs.
    config.experimental_config.frozen_parameter = True
    # An order of execution that frees memory early and is the same in every process.
    config.experimental_config.topology_sorting_strategy = "StableRDFS"
    # Tiling of attention is computed on the device, from the lengths there: without it the host
    # waits for them.
    config.experimental_config.tiling_schedule_optimize = True
    return config


def compiled_ge(compute: Compute) -> Compute:
    """`compute` by the graph engine: a static graph per shape, kept in the folder NVA_GRAPH_CACHE
    if that is set."""
    import torchair

    _raise_limits()
    folder = os.environ.get(CACHE_VARIABLE)
    if folder and foreign(compute):
        names = ", ".join(foreign(compute))
        say(
            f"graphs are not kept in {folder}, as those of {names} could not be told from others",
            logging.WARNING,
        )
    elif folder:
        return cached_ge(compute, folder)
    backend = torchair.get_npu_backend(compiler_config=ge_config())
    program = torch.compile(Program(compute), backend=backend, dynamic=False, fullgraph=True)
    known: list[Any] = [None, None]

    @functools.wraps(compute)
    def run(params: Any, caches: Any, inputs: Any) -> Any:
        if known[0] is not params:
            known[:] = params, _pytree.tree_map(_as_parameter, params)
        return program(known[1], caches, inputs)

    return run


def _as_parameter(weight: Tensor) -> Tensor:
    """The same memory in the form by which the graph engine knows that its address never
    changes."""
    return torch.nn.Parameter(weight, requires_grad=False)


def cached_ge(compute: Compute, folder: str) -> Compute:
    """`compute` by the graph engine, its graphs kept in a folder: a later process compiles none,
    and no process spends time on guards. torchair keeps one graph per method of a module, so every
    shape gets a module and a method."""
    methods: dict[tuple[int, ...], Compute] = {}

    @functools.wraps(compute)
    def run(params: Any, caches: Any, inputs: Any) -> Any:
        tensors = (
            inputs.token_ids,
            inputs.logit_index,
            inputs.attention.block_tables,
            caches[0][0],
        )
        shape = (*(size for tensor in tensors for size in tensor.shape), len(inputs.features or ()))
        if shape not in methods:
            methods[shape] = _method(compute, params["embed"].dtype, shape, folder)
        return methods[shape](params, caches, inputs)

    return run


def _method(compute: Compute, dtype: torch.dtype, shape: tuple[int, ...], folder: str) -> Compute:
    """A compiled method for one shape. torchair's key of its graph is its name, its module's text
    and the options."""
    from torchair.inference import cache_compile

    program = Program(compute, graph_key(compute, dtype))
    name = f"forward_{'_'.join(map(str, shape))}"
    function = types.FunctionType(Program.forward.__code__.replace(co_name=name), globals(), name)
    method = types.MethodType(function, program)
    return cache_compile(method, config=ge_config(), dynamic=False, cache_dir=folder, ge_cache=True)


def graph_key(compute: Compute, dtype: torch.dtype) -> str:
    """All that decides a graph but its shape: the model, the kernels, the type, nva's code, the
    versions below it. Nothing in it is an address, so that it is the same in every process."""
    code = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parents[2].rglob("*.py")):
        code.update(path.read_bytes())
    bound = [
        " ".join(names_of(argument).values()) if isinstance(argument, Kernels) else argument
        for argument in getattr(compute, "args", ())
    ]
    versions = f"torch_npu {torch_npu.__version__}, CANN {torch_npu.npu.utils.get_cann_version()}"
    return f"{bound} in {dtype}, nva {code.hexdigest()}, {versions}"


def foreign(compute: Compute) -> list[str]:
    """The kernels bound in a function that are not nva's own, whose code no key can tell."""
    records = [each for each in getattr(compute, "args", ()) if isinstance(each, Kernels)]
    return [
        name
        for record in records
        for name, full_name in names_of(record).items()
        if not full_name.startswith("nva.kernels.")
    ]


def names_of(kernels: Kernels) -> dict[str, str]:
    """Where each of the functions is defined, by its name among the kernels."""
    functions = attrs.asdict(kernels, recurse=False, filter=lambda _, value: callable(value))
    return {
        name: f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', name)}"
        for name, function in functions.items()
    }


def aclgraph_config() -> Any:
    """Options of the ACL graph."""
    import npugraph_ex

    config = npugraph_ex.CompilerConfig()
    # It warns of what the next line is for.
    warnings.filterwarnings("ignore", "When enable frozen_parameter", UserWarning)
    # Weights and caches stay where they are; without it each replay would copy all of them into the
    # graph's memory.
    config.frozen_parameter = True
    return config


def compiled_aclgraph(compute: Compute) -> Compute:
    """`compute` captured as an ACL graph by npugraph_ex, lengths updated at each replay."""
    import npugraph_ex

    _raise_limits()
    _register_reinplace()
    # A model's scales are constants: as symbols, which lengths must be, every replay would copy
    # them to the device.
    torch._dynamo.config.specialize_float = True
    # Captured operators return what they were given to write to. torch 2.13 warns of that, and
    # raises where CI is set.
    torch._functorch.config.check_custom_op_aliasing = False
    backend = npugraph_ex.get_npu_backend(compiler_config=aclgraph_config())
    program = torch.compile(Program(compute), backend=backend, dynamic=True, fullgraph=True)

    pinned: list[Any] = [None, None]

    @functools.wraps(compute)
    def run(params: Any, caches: Any, inputs: Any) -> Any:
        if pinned[0] is not params or pinned[1] is not caches:  # once: there are hundreds
            pinned[:] = params, caches
            pin(
                (params, caches, inputs.rope_tables, inputs.rope_axes, inputs.attention.mask),
                is_constant=True,
            )
        pin(
            (
                inputs.token_ids,
                inputs.positions,
                inputs.slots,
                inputs.logit_index,
                inputs.is_padding,
            )
        )
        pin((inputs.attention.block_tables, inputs.features, inputs.is_image))
        return program(params, caches, inputs)

    return run


def pin(tree: Any, is_constant: bool = False) -> None:
    """Tell the compiler that the shapes of these tensors are fixed, and perhaps that their
    addresses are too."""
    for tensor in _tensors(tree):
        if is_constant and not hasattr(tensor, "_dynamo_static_input_type"):
            torch._dynamo.mark_static_address(tensor, guard=False)
        torch._dynamo.mark_static(tensor)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _raise_limits() -> None:
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)


@functools.cache
def _register_reinplace() -> None:
    """npu_scatter_pa_kv_cache is missing from npugraph_ex's list of operators that may work in
    place. A decoder that used it would copy every cache twice per step. This has no public name
    yet; the tests count the copies."""
    passes = importlib.import_module("npugraph_ex._acl_concrete_graph.graph_pass")
    passes.register_inplaceable_npu_op(
        "npu_scatter_pa_kv_cache_functional", "npu_scatter_pa_kv_cache", mutated_arg=[2, 3]
    )
