"""The emulated operators for experts compute what the documentation says, and refuse whatever it
refuses."""

from __future__ import annotations

import pytest
import torch

from tests.npu import emulation

npu = torch.ops.npu
LOGITS = torch.log(torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3], [0.2, 0.2, 0.6]]))
FINISHED = torch.tensor([False, False, True])


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def test_routing_gives_the_likeliest_and_their_shares():
    weights, experts, rows = npu.npu_moe_gating_top_k_softmax(LOGITS, FINISHED, 2)
    torch.testing.assert_close(weights[:2], torch.tensor([[0.6, 0.3], [0.5, 0.3]]))
    assert weights[2].isnan().all()
    assert experts.tolist() == [[1, 2], [0, 2], [3, 3]], (
        "a finished row has the expert that doesn't exist"
    )
    assert rows.tolist() == [[0, 3], [1, 4], [2, 5]]


def route(x=None, experts=((1, 2), (0, 2), (3, 3)), dtype=torch.int32, **changes):
    x = torch.arange(3.0)[:, None].expand(-1, 2) if x is None else x
    options = {
        "active_num": 6,
        "expert_num": 4,
        "active_expert_range": [0, 3],
        "expert_tokens_num_type": 1,
    }
    options |= {"expert_tokens_num_flag": True, **changes}
    return npu.npu_moe_init_routing_v2(x, torch.tensor(experts, dtype=dtype), **options)


def test_rows_are_sorted_by_expert():
    """Row 1 to expert 0, row 0 to expert 1, rows 0 and 1 to expert 2; row 2 to nobody."""
    expanded, places, counts, _ = route()
    assert expanded[:4].tolist() == [[1, 1], [0, 0], [0, 0], [1, 1]]
    assert expanded[4:].isnan().all()
    assert places.tolist() == [1, 2, 0, 3, -1, -1], (
        "where each of a token's rows went, token by token"
    )
    assert counts.tolist() == [1, 1, 2]


def test_a_range_of_experts_counts_from_its_start():
    expanded, places, counts, _ = route(active_expert_range=[1, 3])
    assert expanded[:3, 0].tolist() == [0, 0, 1]
    assert places.tolist() == [0, 1, -1, 2, -1, -1]
    assert counts.tolist() == [1, 2]


ROWS, WEIGHTS = torch.randn(5, 4), torch.randn(3, 4, 2)


def multiply(groups=(1, 0, 3), x=ROWS, weight=WEIGHTS, **changes):
    options = {"split_item": 2, "group_type": 0, "group_list_type": 1, **changes}
    groups = groups if isinstance(groups, torch.Tensor) else torch.tensor(groups)
    return npu.npu_grouped_matmul([x], [weight], group_list=groups, **options)[0]


@pytest.mark.parametrize(
    ("groups", "group_list_type"), [((1, 0, 3), 1), ((1, 1, 4), 0)], ids=["counts", "running sum"]
)
def test_a_grouped_product(groups, group_list_type):
    out = multiply(groups, group_list_type=group_list_type)
    torch.testing.assert_close(out[:1], ROWS[:1] @ WEIGHTS[0])
    torch.testing.assert_close(out[1:4], ROWS[1:4] @ WEIGHTS[2])
    assert out[4:].isnan().all(), "what no group has is undefined"


SCALES = torch.tensor([[0.5, 2.0], [1.0, 0.0]])


def combine(places=(3, 1, 0, 2), rows=ROWS[:4], scales=SCALES, mode=2, **changes):
    skips = [changes.get(name) for name in ("skip1", "skip2", "bias")]
    places = places if isinstance(places, torch.Tensor) else ints(*places)
    return npu.npu_moe_finalize_routing(rows, *skips, scales, places, None, drop_pad_mode=mode)


def test_rows_are_weighted_and_added():
    """Mode 2 reads the places token by token, mode 0 one expert of all tokens after the other."""
    torch.testing.assert_close(combine(), torch.stack([0.5 * ROWS[3] + 2 * ROWS[1], ROWS[0]]))
    torch.testing.assert_close(combine(mode=0), torch.stack([0.5 * ROWS[3] + 2 * ROWS[0], ROWS[1]]))


@pytest.mark.parametrize(("approximate", "name"), [(1, "tanh"), (0, "none")])
def test_geglu(approximate, name):
    x = torch.randn(5, 16)
    left, right = x.chunk(2, -1)
    gelu = torch.nn.functional.gelu(left, approximate=name)
    out, gate = npu.npu_geglu(x, approximate=approximate, activate_left=True)
    torch.testing.assert_close((out, gate), (gelu * right, gelu))
    out, gate = npu.npu_geglu(torch.cat([right, left], -1), approximate=approximate)
    torch.testing.assert_close((out, gate), (gelu * right, gelu))


def gate(x=LOGITS, finished=None, k=2):
    npu.npu_moe_gating_top_k_softmax(x, finished, k)


REFUSED = {
    "flat logits": (lambda: emulation.experts.gating_top_k_softmax(LOGITS[0]), "2 dimensions"),
    "whole logits": (lambda: gate(LOGITS.int()), "floats"),
    "k = 0": (lambda: gate(k=0), "k is in"),
    "k past the experts": (lambda: gate(k=4), "k is in"),
    "k past 1024": (lambda: gate(torch.zeros(1, 2000), k=1025), "k is in"),
    "finished as a number": (lambda: gate(finished=FINISHED.int()), "finished is bool"),
    "finished per expert": (lambda: gate(finished=FINISHED.expand(3, 3)), "one entry per row"),
    "whole x": (lambda: route(x=torch.zeros(3, 2, dtype=torch.int32)), "floats"),
    "int64 experts": (lambda: route(dtype=torch.int64), "int32"),
    "experts of other rows": (lambda: emulation.experts.init_routing(ROWS, ints((0, 1))), "a row per row"),
    "no number of experts": (lambda: route(expert_num=-1), "expert_num"),
    "too many experts": (lambda: route(expert_num=10241), "expert_num"),
    "an expert too far": (lambda: route(expert_num=3), r"experts are in \[0, 3\)"),
    "a negative expert": (lambda: route(experts=((1, 2), (0, 2), (-1, 1))), "experts are in"),
    "no range": (lambda: route(active_expert_range=[]), "a pair"),
    "a range too far": (lambda: route(active_expert_range=[0, 5]), "lies in"),
    "an active number": (lambda: route(active_num=3), "rows times k"),
    "no counts": (lambda: route(expert_tokens_num_flag=False), "flag is set"),
    "running sums": (lambda: route(expert_tokens_num_type=0), "type 1"),
    "dropping": (lambda: route(drop_pad_mode=1, expert_capacity=2), "drops and quantizes"),
    "quantizing": (lambda: route(quant_mode=1), "drops and quantizes"),
    "indices to scatter": (lambda: route(row_idx_type=1), "row_idx_type"),
    "a scale": (lambda: route(scale=torch.ones(3)), "scale"),
    "int32 counts": (lambda: multiply(ints(1, 0, 3)), "int64"),
    "no groups": (lambda: npu.npu_grouped_matmul([ROWS], [WEIGHTS], split_item=2, group_type=0), "int64"),
    "a group without weights": (lambda: multiply((1, 0, 3, 1)), "entry per weight"),
    "a negative count": (lambda: multiply((1, -1, 3)), "negative"),
    "counts as a running sum": (lambda: multiply(group_list_type=0), "negative"),
    "a running sum as counts": (lambda: multiply((1, 1, 4)), "fit 5 rows"),
    "pairs": (lambda: multiply(group_list_type=2), "0 or 1"),
    "many results": (lambda: multiply(split_item=0), "split_item"),
    "groups of columns": (lambda: multiply(group_type=2), "group_type"),
    "another width": (lambda: multiply(x=torch.zeros(5, 3)), "rows of weight"),
    "types": (lambda: multiply(x=ROWS.half()), "one float type"),
    "a transposed x": (lambda: multiply(x=torch.zeros(4, 5).T), "transposed"),
    "weights of one expert": (lambda: emulation.experts.check_product(ROWS, WEIGHTS[0]), "weight 3"),
    "a wide x": (lambda: multiply(x=torch.zeros(1, 65536), weight=torch.zeros(3, 65536, 1)), "below 65536"),
    "a wide result": (lambda: multiply(x=torch.zeros(1, 1), weight=torch.zeros(3, 1, 65536)), "below 65536"),
    "too many groups": (lambda: multiply([0] * 1025, x=ROWS, weight=torch.zeros(1025, 4, 1)), "1024 groups"),
    "two weights": (lambda: npu.npu_grouped_matmul([ROWS], [WEIGHTS] * 2, group_type=0, split_item=2), "one weight"),
    "an activation": (lambda: multiply(act_type=5), "act_type"),
    "a bias": (lambda: multiply(bias=[torch.zeros(2)]), "bias"),
    "a place too far": (lambda: combine((3, 1, 0, 4)), "places are in"),
    "a place of padding": (lambda: combine((3, 1, 0, -1)), "places are in"),
    "int64 places": (lambda: combine(torch.tensor([3, 1, 0, 2])), "int32"),
    "too few places": (lambda: combine((3, 1)), "4 rows"),
    "scales of another type": (lambda: combine(scales=SCALES.half()), "type"),
    "no scales": (lambda: combine(scales=None), "scales"),
    "whole rows": (lambda: combine(rows=ROWS[:4].int()), "floats"),
    "a mode that drops": (lambda: combine(mode=3), "drops nothing"),
    "a skip": (lambda: combine(skip1=torch.zeros(2, 4)), "skip1"),
    "an odd geglu": (lambda: emulation.geglu(torch.zeros(2, 7)), "even"),
    "geglu of whole numbers": (lambda: npu.npu_geglu(torch.zeros(2, 8, dtype=torch.int32)), "floats"),
    "another gelu": (lambda: npu.npu_geglu(torch.zeros(2, 8), approximate=2), "0 or 1"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "text"), REFUSED.values(), ids=REFUSED)
def test_operators_refuse(call, text):
    with pytest.raises(emulation.LimitError, match=text):
        call()
