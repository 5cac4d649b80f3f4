"""Which graph mode an Ascend installation gets, and why: the table of docs/npu.md. No torch_npu is
needed for that."""

from __future__ import annotations

import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nva.kernels import backend, npu
from nva.kernels.cpu.device import PLAIN
from nva.kernels.npu.support import (
    MODES,
    Installation,
    Route,
    attention_route,
    choose_mode,
    filled_head_dim,
    parse_version,
    refusals,
)


def heads(n_heads=8, n_kv_heads=2, head_dim=128, window=None, tower=None):
    vision = tower and types.SimpleNamespace(hidden_size=4 * tower, n_heads=4)
    return types.SimpleNamespace(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        windows=(None, window),
        vision=vision,
    )


GROUPED, WINDOWED, EVEN, WIDE = (
    heads(),
    heads(window=4096),
    heads(n_kv_heads=8),
    heads(head_dim=256),
)


@pytest.mark.parametrize(
    ("cann", "model", "expected"),
    [
        ((8, 2), GROUPED, "no paged attention"),
        ((8, 3), GROUPED, False),
        ((8, 3), WINDOWED, False),
        ((8, 3), WIDE, "head_dim 256"),
        ((8, 3), heads(head_dim=192), "head_dim 192"),
        ((8, 5), GROUPED, True),
        ((8, 5), WINDOWED, False),
        ((8, 5), EVEN, False),
        ((8, 5), WIDE, True),
        ((8, 5), heads(head_dim=80), True),
        ((8, 5), heads(n_kv_heads=8, head_dim=80), "head_dim 80"),
        ((9, 0), EVEN, True),
        ((9, 0), WINDOWED, True),
        ((9, 1), heads(head_dim=512), "head_dim 512"),
        ((9, 1), heads(head_dim=40), "head_dim 40"),
        ((9, 1), heads(n_heads=128, n_kv_heads=1), "64 to one"),
        (None, WINDOWED, True),
    ],
)
def test_attention_route(cann, model, expected):
    """Expected: a part of the reason against it, or whether lengths may be tensors."""
    route = attention_route(cann, model)
    if isinstance(expected, str):
        assert expected in route
    else:
        assert isinstance(route, Route)
        assert route.takes_tensors == expected


@pytest.mark.parametrize(
    ("found", "model", "mode", "reason"),
    [
        (Installation(), GROUPED, "aclgraph", "supports it"),
        (Installation(), heads(tower=128), "aclgraph", "supports it"),
        (Installation(has_npugraph_ex=False), GROUPED, "ge", "npugraph_ex"),
        (Installation(has_npugraph_ex=False, cann=(8, 3)), GROUPED, "eager", "tensor lengths"),
        (Installation(has_npugraph_ex=False, has_torchair=False), GROUPED, "eager", "torchair"),
    ],
)
def test_auto_takes_what_works_and_says_why(found, model, mode, reason):
    chosen, why = choose_mode("auto", found, model)
    assert chosen == mode
    assert reason in why


def test_what_will_not_work_is_refused_with_a_reason():
    with pytest.raises(
        ValueError, match="graph='ge' won't work here: .* tensor lengths; graph='auto'"
    ):
        choose_mode("ge", Installation(cann=(8, 3)), GROUPED)
    with pytest.raises(ValueError, match="vision tower's heads of 144 are wider than 128"):
        choose_mode("eager", Installation(), heads(tower=144))
    with pytest.raises(ValueError, match="npu_fused_infer_attention_score_v2"):
        choose_mode("auto", Installation(has_attention=False), GROUPED)
    with pytest.raises(ValueError, match="choose one of auto, eager, ge, aclgraph"):
        choose_mode("npugraph", Installation(), GROUPED)


@given(
    cann=st.none() | st.tuples(st.integers(7, 10), st.integers(0, 5)),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    model=st.builds(
        heads,
        st.sampled_from([8, 64, 128]),
        st.sampled_from([1, 2, 8]),
        st.sampled_from([40, 64, 256, 512]),
        tower=st.sampled_from([None, 72, 192]),
    ),
)
def test_every_installation_gets_a_mode_or_an_error(cann, flags, model):
    """auto never takes a mode that would be refused by name, and every refusal has a reason."""
    found = Installation(
        cann=cann, has_attention=flags[0], has_torchair=flags[1], has_npugraph_ex=flags[2]
    )
    working = [mode for mode in MODES if refusals(found, model)[mode] is None]
    if working:
        assert choose_mode("auto", found, model)[0] in working
        assert "eager" in working, "whatever runs in a graph runs without one"
    else:
        with pytest.raises(ValueError, match="can't run this model"):
            choose_mode("auto", found, model)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("8.5.0", (8, 5)),
        ("8.3.RC1.alpha001", (8, 3)),
        ("CANN-9.1", (9, 1)),
        ("", None),
        (None, None),
        ("unknown", None),
    ],
)
def test_parse_version(text, version):
    assert parse_version(text) == version


def test_without_torch_npu_the_error_says_what_to_install():
    with pytest.raises(ValueError, match=r"pip install 'nva\[npu\]'"):
        backend("npu", GROUPED)


@pytest.mark.parametrize(("head_dim", "filled"), [(16, 64), (64, 64), (72, 128), (128, 128)])
def test_heads_of_a_tower_are_filled_up(head_dim, filled):
    assert filled_head_dim(head_dim) == filled


def test_graph_modes_are_for_an_npu():
    with pytest.raises(ValueError, match="is for device npu"):
        backend("cpu", GROUPED, "ge")


@pytest.mark.parametrize(
    ("found", "said"), [(Installation(), "aclgraph"), (Installation(has_npugraph_ex=False), "ge")]
)
def test_the_mode_that_auto_chose_is_said_with_its_reason(found, said, monkeypatch, caplog):
    caplog.set_level("INFO", "nva")
    imported = []

    def import_module(name):
        imported.append(name)
        devices = {"EAGER": PLAIN, "ACLGRAPH": PLAIN, "GE": PLAIN}
        return types.SimpleNamespace(**devices, place=lambda name: torch.device("cpu"))

    monkeypatch.setattr(npu.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(npu.importlib, "import_module", import_module)
    monkeypatch.setattr(npu, "probe", lambda: found)
    npu.choose("npu", GROUPED, "auto")
    assert ("nva.kernels.npu.ge" in imported) == (said == "ge"), "no other mode's compiler"
    (line,) = caplog.messages
    assert line.startswith(f"NPU graph mode {said} (")
    assert ("no npugraph_ex" in line) == (said == "ge")
    npu.choose("npu", GROUPED, "eager")
    assert caplog.messages == [line]
