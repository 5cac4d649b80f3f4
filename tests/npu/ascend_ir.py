"""An interpreter of Ascend IR graphs on the CPU: it runs what the graph engine would be given to
compile.

A graph is torchair's protobuf: operators in topological order, inputs named "producer:output". The
law: what an operator means comes from its IR declaration (names of inputs by position, attributes,
and their defaults, which the graph leaves out) and never from the Python operator that it was
converted from. Read next: ascend_ir_text.py, what the operators mean; lowering.py, which catches
the graphs."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchair._ge_concrete_graph import auto_generated_ge_raw_ops as declarations
from torchair.ge._ge_graph import _ge_proto_dtype_to_ge_dtype, ge_type_to_torch_type

from tests.npu import ascend_ir_text, ascend_ir_vision

Tensor = torch.Tensor
Outputs = Sequence[Tensor]

MEANINGS: dict[str, Callable[..., Outputs]] = {
    **ascend_ir_text.MEANINGS,
    **ascend_ir_vision.MEANINGS,
}


def run(graph: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The graph's results for these inputs. Inputs that the graph updates in place are updated."""
    values: dict[str, Tensor] = {}
    for op in graph.op:
        if op.type == "NetOutput":
            return [values[name] for name in op.input]
        if op.type == "Data":
            values[f"{op.name}:0"] = inputs[op.attr["index"].i]
        else:
            outputs = MEANINGS[op.type](**arguments(op, values), **attributes(op))
            check_types(op, outputs)
            values.update({f"{op.name}:{i}": output for i, output in enumerate(outputs)})
    raise ValueError("the graph has no NetOutput")


def arguments(op: Any, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The operator's inputs by the names of its IR declaration, absent ones left out."""
    names = dict(
        zip(op.attr["_input_name_value"].list.i, op.attr["_input_name_key"].list.s, strict=True)
    )
    return {names[i].decode(): values[source] for i, source in enumerate(op.input) if source}


def attributes(op: Any) -> dict[str, Any]:
    """The operator's attributes, the IR's defaults where the graph has none. Names that begin with
    _ are torchair's."""
    given = {name: attribute(value) for name, value in op.attr.items() if not name.startswith("_")}
    return {**defaults(op.type), **given}


def attribute(value: Any) -> Any:
    """A protobuf attribute as a Python value."""
    kind = value.WhichOneof("value")
    if kind == "list":
        return [
            *value.list.i,
            *value.list.f,
            *value.list.b,
            *(text.decode() for text in value.list.s),
        ]
    if kind == "t":
        return constant(value.t)
    return value.s.decode() if kind == "s" else getattr(value, kind)


def constant(tensor: Any) -> Tensor:
    """A protobuf tensor, its raw bytes little-endian."""
    shape, dtype = tuple(tensor.desc.shape.dim), declared_type(tensor.desc)
    if not tensor.data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(tensor.data), dtype=dtype).reshape(shape)


def declared_type(desc: Any) -> torch.dtype:
    """The type in a protobuf tensor description."""
    return ge_type_to_torch_type(_ge_proto_dtype_to_ge_dtype(desc.dtype))


@functools.cache
def defaults(op_type: str) -> dict[str, Any]:
    """The default attributes of an operator by its IR declaration, {} where torchair writes them
    all out."""
    text = getattr(getattr(declarations, op_type, None), "__doc__", None) or ""
    found = re.findall(r"\.ATTR\((\w+), (\w+), (.*)\)\\?n?$", text, re.MULTILINE)
    return {name: literal(kind, value.strip()) for name, kind, value in found}


def literal(kind: str, value: str) -> Any:
    """A C++ literal of an IR declaration."""
    if kind == "Bool":
        return value == "true"
    if kind.startswith("List"):
        return ast.literal_eval(value.replace("{", "[").replace("}", "]"))
    return ast.literal_eval(value)


def check_types(op: Any, outputs: Outputs) -> None:
    """Results have the types that torchair noted when it converted the operator."""
    for output, desc in zip(outputs, op.output_desc, strict=False):
        note = desc.attr["_meta"].s.decode() if "_meta" in desc.attr else ""
        if note and f"dtype={output.dtype}," not in note:
            raise TypeError(f"{op.type} {op.name} gives {output.dtype}, the graph notes {note}")
