"""The example of a custom operator: meaning, schema, shapes, tracing and gradient."""

from __future__ import annotations

import pytest
import torch

from examples.custom_operator import rotary
from nva.kernels import reference


def inputs(dtype=torch.float64, requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, dtype=dtype, generator=generator, requires_grad=requires_grad)
        for shape in ((5, 3, 8), (5, 8), (5, 8))
    ]


def test_its_meaning_is_the_references():
    x, cos, sin = inputs(torch.float32, requires_grad=False)
    torch.testing.assert_close(rotary(x, cos, sin), reference.rotary(x, x, cos, sin)[0])


def test_schema_shapes_and_registration_agree_with_the_meaning():
    torch.library.opcheck(rotary, tuple(inputs()))
    assert (
        str(torch.ops.nva.rotary.default._schema)
        == "nva::rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor"
    )


def test_gradients_are_those_of_finite_differences():
    assert torch.autograd.gradcheck(rotary, inputs())


def test_it_traces_as_one_operator():
    graphs = []

    def keep(module, _):
        graphs.append(module)
        return module

    x, cos, sin = inputs(torch.float32, requires_grad=False)
    compiled = torch.compile(lambda *args: rotary(*args) * 2, backend=keep, fullgraph=True)
    torch.testing.assert_close(compiled(x, cos, sin), rotary(x, cos, sin) * 2)
    calls = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert torch.ops.nva.rotary.default in calls
    torch._dynamo.reset()


def test_wrong_shapes_are_told_when_traced():
    x, cos, _ = (tensor.to("meta") for tensor in inputs(requires_grad=False))
    with pytest.raises(ValueError, match="cos and sin are"):
        rotary(x, cos[:, :4], cos[:, :4])
