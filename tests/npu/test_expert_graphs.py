"""Rungs c and d for the experts alone: a graph is compiled once, and holds for every routing."""

from __future__ import annotations

import functools

import attrs
import pytest
import torch
import torchair

from nva.kernels import reference
from nva.kernels.npu import graph, operators
from tests.npu import ascend_ir, emulation, lowering
from tests.npu.test_kernels import experts_out, sent_to

ROUTINGS = {
    "every expert": [0, 1, 2, 3] * 3,
    "all tokens on the first": [0] * 12,
    "all tokens on the last": [3] * 12,
    "two without a token": [1, 2] * 6,
    "padding on an expert of its own": [0, 1, 2, 0, 1, 2, 0, 3, 3, 3, 3, 3],
}


def compiled(case):
    """The kernel as the graph engine compiles it, with its constants bound."""
    backend = torchair.get_npu_backend(compiler_config=graph.ge_config())
    function = functools.partial(operators.moe, n_active=case.n_active, normalize=case.normalize)
    return torch.compile(function, backend=backend, dynamic=False, fullgraph=True)


def test_one_graph_holds_for_every_routing():
    with torch.no_grad(), lowering.caught() as found:
        cases = [sent_to(experts) for experts in ROUTINGS.values()]
        moe = compiled(cases[0])
        weights = operators.pack_linear(cases[0].gate_up), operators.pack_linear(cases[0].down)
        for case in cases:
            case.x[case.is_padding] = torch.nan
            case.logits[case.is_padding] = torch.nan
            out = moe(case.x, case.logits, *weights, is_padding=case.is_padding)[~case.is_padding]
            torch.testing.assert_close(out, experts_out(reference, case), rtol=1e-5, atol=1e-5)
    assert len(found) == 1
    fused = {
        "MoeGatingTopKSoftmax": 1,
        "MoeInitRoutingV3": 1,
        "GroupedMatmul": 2,
        "SwiGlu": 1,
        "MoeFinalizeRoutingV2": 1,
    }
    assert fused.items() <= dict(found[0].counts).items()
    assert set(found[0].counts) - fused.keys() == {
        "Data",
        "Const",
        "Cast",
        "Fill",
        "ClipByValueV2",
        "NetOutput",
    }


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [("GroupedMatmul", "group_list_type", 0), ("MoeFinalizeRoutingV2", "drop_pad_mode", 0)],
    ids=["counts read as a running sum", "places read in the other order"],
)
def test_a_graph_with_another_attribute_is_caught(kind, name, value):
    """The attributes are in the graph itself, where a converter could have lost them."""
    case = attrs.evolve(sent_to([0, 1, 2, 3] * 3), n_active=2)
    weights = operators.pack_linear(case.gate_up), operators.pack_linear(case.down)

    def run_altered(graph, inputs):
        for op in graph.op:
            if op.type == kind:
                assert op.attr[name].i != value
                op.attr[name].i = value
        return ascend_ir.run(graph, inputs)

    with torch.no_grad(), lowering.caught(run_altered):
        try:
            out = compiled(case)(case.x, case.logits, *weights, is_padding=case.is_padding)[
                ~case.is_padding
            ]
        except emulation.LimitError:
            return
    assert not torch.allclose(out, experts_out(reference, case), atol=0.1)
