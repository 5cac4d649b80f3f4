"""Catches what torchair and npugraph_ex would give a device to compile, and runs it on the CPU
instead.

`caught()` replaces what asks CANN or a device (is an operator known? which chip? start the engine)
and the last step of each compiler, no more: tracing, functionalization, passes and conversion are
the wheel's own. The law: a graph that was caught is the graph that runs. Read next: ascend_ir.py,
which runs the graph engine's."""

from __future__ import annotations

import collections
import contextlib
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import attrs
import npugraph_ex
import torch
import torch_npu
import torchair
import torchair._ge_concrete_graph.compat_ir as compat_ir
import torchair._ge_concrete_graph.fx2ge_converter as fx2ge
import torchair.npu_fx_compiler as ge_compiler
import torchair.patterns._recover_view_inplace_pattern as recover_view

from tests.npu import ascend_ir

CHIP = "Ascend910B3"
KERNEL = """
from torchair._ge_concrete_graph.ge_ir_pb2 import ModelDef
from tests.npu import ascend_ir
graph = ModelDef.FromString({model!r}).graph[0]
def kernel(*inputs):
    return ascend_ir.run(graph, inputs)
"""

# A process may use both compilers if torchair is first to patch torch: npugraph_ex then leaves its
# own patches out, and torchair would fail over npugraph_ex's.
torchair._utils.add_npu_patch({}, torchair.CompilerConfig())
# The first use loads the real module; submodules imported before it would be copies of those that
# compile.
assert npugraph_ex.CompilerConfig
ex_compiler = importlib.import_module("npugraph_ex.npu_fx_compiler")
ex_recover_view = importlib.import_module("npugraph_ex.patterns._recover_view_inplace_pattern")


@attrs.frozen(kw_only=True)
class Caught:
    """One graph: how often each operator occurs in it, and the graph itself (Ascend IR, or FX for
    ACL graphs)."""

    counts: collections.Counter[str]
    graph: Any
    compiled: Any  # the compiler's own record of it


@contextlib.contextmanager
def caught(run_ir: Callable[..., Any] = ascend_ir.run) -> Iterator[list[Caught]]:
    """Within, torch.compile for the NPU works on CPU tensors; the list holds one entry per compiled
    graph."""
    found: list[Caught] = []
    with contextlib.ExitStack() as stack:
        replace = lambda owner, name, value: stack.enter_context(  # noqa: E731 - short, and used below
            mock.patch.object(owner, name, value)
        )
        for npu in (torch_npu.npu, torch.npu):
            replace(npu, "get_device_name", lambda *_: CHIP)
            replace(npu, "current_device", lambda: 0)
            stream = types.SimpleNamespace(stream_id=0, device_index=0, priority=0)
            replace(npu, "current_stream", lambda *_, stream=stream: stream)
        replace(torch.npu, "graph_pool_handle", lambda: (0, 1))
        replace(fx2ge, "initialize_graph_engine", lambda *_, **__: None)
        replace(
            fx2ge, "warnings", types.SimpleNamespace(warn=lambda *_: None)
        )  # that frozen weights must not move
        replace(
            compat_ir, "is_cann_compat", lambda *_, **__: ""
        )  # an empty answer: CANN knows the operator
        replace(recover_view, "_is_supported_cann_version", lambda _: True)
        replace(ex_recover_view, "_is_supported_cann_version", lambda _: True)
        replace(ex_compiler, "replace_stream_event_pass", lambda module: module)
        replace(ge_compiler._NpuFxCompiler, "_gen_compiled_gm", catch_ge(found, run_ir))
        replace(ex_compiler._NpuFxCompiler, "_gen_compiled_gm", catch_ex(found))
        replace(
            ex_compiler._CompiledFxGraph, "__call__", lambda self, *inputs: self.runner(*inputs)
        )
        yield found
    torch._dynamo.reset()  # compiled functions outlive the replaced compilers otherwise


def catch_ge(found: list[Caught], run_ir: Callable[..., Any]) -> Callable[..., Any]:
    """torchair's last step: its Ascend IR graph, to be interpreted."""
    convert = ge_compiler._NpuFxCompiler._gen_compiled_gm

    def compile_graph(self: Any, module: Any, example_inputs: Any, observer: Any) -> Any:
        compiled = convert(self, module, example_inputs, observer)
        graph = compiled.graph
        found.append(
            Caught(
                counts=collections.Counter(op.type for op in graph.op),
                graph=graph,
                compiled=compiled,
            )
        )
        return Runner(graph, run_ir)

    return compile_graph


class Runner:
    """A compiled graph as torchair's graph cache wants one: it runs, and it can be written as
    Python code."""

    def __init__(self, graph: Any, run_ir: Callable[..., Any]) -> None:
        self.graph, self.run_ir = graph, run_ir

    def __call__(self, *inputs: Any) -> Any:
        return self.run_ir(self.graph, inputs)

    def codegen(self, **_: Any) -> str:
        """Code whose `kernel` runs the graph."""
        return KERNEL.format(model=self.graph.SerializeToString())


def catch_ex(found: list[Caught]) -> Callable[..., Any]:
    """npugraph_ex's last step: its FX graph after all passes, to be run operator by operator as a
    capture would."""
    convert = ex_compiler._NpuFxCompiler._gen_compiled_gm

    def compile_graph(self: Any, module: Any, example_inputs: Any, observer: Any) -> Any:
        compiled = convert(self, module, example_inputs, observer)
        graph = compiled.fx_graph.graph
        counts = collections.Counter(
            str(node.target) for node in graph.nodes if node.op == "call_function"
        )
        found.append(Caught(counts=counts, graph=graph, compiled=compiled))
        return compiled.fx_graph

    return compile_graph
