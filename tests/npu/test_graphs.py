"""Rungs c and d: what the forward compiles to in both graph modes, how often, and that the graph
itself is right.

The graphs are those that a device would get. The graph engine's run by the interpreter of Ascend
IR, ACL graphs operator by operator, both on emulated operators, through whole runs of the engine.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest
import torch

from nva.forward import make_forward
from nva.kernels import Kernels
from nva.kernels.cpu.device import PLAIN
from nva.kernels.npu import ge, graph
from nva.loading.warm_up import filled_batch
from nva.models.decoder import decode
from tests.devices import mutated
from tests.npu import emulation, folds, lowering, models
from tests.npu.expected import aclgraph_counts, as_counted, ge_counts, ge_kinds, n_step_inputs
from tests.npu.here import ACLGRAPH, GE
from tests.npu.test_meaning import ALL_ACTIVE, TOLERANCE

BUCKETS = {"token_buckets": (16, 256), "row_buckets": (6,)}


def run(name, device, dtype=torch.float32, **changes):
    """A run of the engine with the compiled forward: (spec, report, graphs)."""
    spec = models.tiny_spec(name)
    limits = folds.limits_for(spec, **{**BUCKETS, **changes})
    with lowering.caught() as found:
        sides = [
            folds.Side(
                forward=make_forward(spec, limits, each),
                params=models.tiny_params(spec, each.kernels, dtype),
            )
            for each in (PLAIN, device)
        ]
        report = folds.compare(spec, limits, *sides, folds.requests_for(spec), dtype)
    return spec, report, found


@pytest.mark.parametrize("name", models.CONFIGS)
def test_graph_engine(name):
    with emulation.fp32_arithmetic():
        spec, report, found = run(name, GE)
    assert report.deviation < TOLERANCE
    assert len(found) == len(report.shapes) == 2, (
        "one compilation per shape, whatever the lengths and images"
    )
    assert 0 < report.n_images < report.n_steps or not spec.vision, (
        "steps with images and steps without"
    )
    for caught in found:
        counts = as_counted(caught)
        assert ge_counts(spec) == {kind: counts.get(kind, 0) for kind in ge_counts(spec)}
        assert set(caught.counts) <= ge_kinds(spec)
        kinds = [info.value_type.name for info in caught.compiled._input_info_list]
        n_constants = (
            2 * spec.n_layers + 2 * len(spec.ropes) + bool(spec.rope_axes) + 1
        )  # caches, tables, mask
        n_passed = n_constants + n_step_inputs(spec) + 2  # the lengths are inputs too
        assert kinds.count("TENSOR") == n_passed, "weights are constants"


@pytest.mark.parametrize("name", models.CONFIGS)
def test_aclgraph(name):
    with emulation.fp32_arithmetic():
        spec, report, found = run(name, ACLGRAPH)
    assert report.deviation < TOLERANCE
    assert len(found) == len(report.shapes) == 2
    for caught in found:
        counts = aclgraph_counts(spec)
        assert counts == {name: caught.counts[name] for name in counts}
        check_replay(spec, caught.compiled._aclgraph_cache_info)


def check_replay(spec, captured):
    """What a replay does: only the step's own inputs are copied in, and every attention gets new
    lengths."""
    assert len(captured.user_inputs_mapping) == n_step_inputs(spec)
    assert len(captured.mutated_user_inputs) == 2 * spec.n_layers
    assert captured.unupdated_sym_input_index == []  # so one capture per shape
    rulers = captured.ops_update_rulers
    assert len(rulers) == spec.n_layers
    assert all({"actual_seq_qlen", "actual_seq_kvlen"} <= set(ruler) for ruler in rulers.values())


@pytest.mark.parametrize("device", [GE, ACLGRAPH], ids=["ge", "aclgraph"])
@pytest.mark.parametrize(
    "name",
    [
        "qwen2",
        "qwen3, heads wider than the model, tied",
        ALL_ACTIVE,
        "gemma3",
        "minicpm4",
        models.SEEING,
    ],
)
def test_half_types_lower_as_they_are(name, device):
    """In bfloat16 the graphs differ (a bias joins its product, logits are cast); all limits on
    types hold in them."""
    spec, report, found = run(name, device, torch.bfloat16, token_buckets=(256,))
    assert report.deviation < 0.4
    assert len(found) == 1
    if device is GE:
        counts = as_counted(found[0])
        assert ge_counts(spec) == {kind: counts.get(kind, 0) for kind in ge_counts(spec)}
        assert set(counts) <= ge_kinds(spec) - (set() if spec.vision else {"Add"})


def test_more_shapes_than_torch_allows_by_itself():
    """Nine buckets: torch's own limit of 8 compilations would stop at the ninth."""
    buckets = (16, 18, 20, 22, 24, 26, 28, 30, 256)
    spec = models.tiny_spec("llama")
    limits = folds.limits_for(spec, token_buckets=buckets)
    with (
        emulation.fp32_arithmetic(),
        lowering.caught(lambda *_: [torch.zeros(6, spec.vocab_size)]) as found,
    ):
        compute = make_forward(spec, limits, GE)
        params, kv = (
            models.tiny_params(spec, GE.kernels),
            folds.empty_kv(spec, limits, torch.float32),
        )
        for bucket in (*buckets, *buckets):
            _, kv = compute(params, kv, filled_batch(limits, bucket, 6))
    assert len(found) == len(buckets)


GE_FAULTS = {
    "PA_NZ left as the cache mode": lambda k, v, kc, vc, slots: ge.npu.npu_scatter_pa_kv_cache(
        k, v, kc, vc, slots
    ),
    "K and V swapped": lambda k, v, kc, vc, slots: ge.npu.npu_scatter_pa_kv_cache(
        v, k, kc, vc, slots, cache_mode="Norm"
    ),
    "slots shifted": lambda k, v, kc, vc, slots: ge.npu.npu_scatter_pa_kv_cache(
        k, v, kc, vc, slots + 1, cache_mode="Norm"
    ),
}


@pytest.mark.parametrize("fault", GE_FAULTS.values(), ids=GE_FAULTS)
def test_faults_in_the_graph_are_caught(fault):
    with emulation.fp32_arithmetic():
        try:
            _, report, _ = run("llama", mutated(GE, write_kv=fault), token_buckets=(256,))
        except emulation.LimitError:
            return
    assert report.deviation > 10 * TOLERANCE


def test_cumulative_context_lens_in_the_graph_are_caught():
    def cumulative(*args):
        lengths = ge.attention_inputs(*args)
        return lengths._replace(context_lens=lengths.context_lens.cumsum(0))

    with (
        emulation.fp32_arithmetic(),
        pytest.raises(emulation.LimitError, match="don't fit a table"),
    ):
        run("llama", mutated(GE, attention_inputs=cumulative), token_buckets=(256,))


def test_a_decoder_may_use_the_other_cache_write_in_an_aclgraph():
    """npugraph_ex lacks the rule by which npu_scatter_pa_kv_cache stays in place; nva registers
    it."""

    def write_kv(k, v, k_cache, v_cache, slots):
        ge.write_kv(k, v.contiguous(), k_cache, v_cache, slots)

    with emulation.fp32_arithmetic():
        spec, report, found = run(
            "llama", mutated(ACLGRAPH, write_kv=write_kv), token_buckets=(256,)
        )
    assert report.deviation < TOLERANCE
    assert found[0].counts["npu.npu_scatter_pa_kv_cache.default"] == spec.n_layers
    assert found[0].counts["aten.copy_.default"] == 0


def test_integers_of_the_spec_are_constants():
    """Bound in anything but a module they would be symbols, and every replay would compare them."""
    assert isinstance(graph.Program(print), torch.nn.Module)


def key_of(name, kernels: Kernels, dtype=torch.bfloat16):
    return graph.graph_key(functools.partial(decode, models.tiny_spec(name), kernels), dtype)


KEY = """
import torch_npu
from nva.kernels.npu.ge import GE
from tests.npu.test_graphs import key_of
print(key_of("llama", GE.kernels))
"""


def test_a_graphs_key_is_the_same_in_every_process():
    """It names the model, the kernels and the type, and no address, which two processes that start
    from other places show."""
    keys = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", f"{padding}{KEY}"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
        ).stdout.splitlines()[-1]
        for seed, padding in enumerate(("", "kept = [object() for _ in range(10**6)]"))
    }
    assert keys == {key_of("llama", GE.kernels)}, "the line that was printed last"
    assert " at 0x" not in keys.pop()


def test_a_graphs_key_tells_what_it_was_made_of():
    keys = [
        key_of("llama", GE.kernels),
        key_of("qwen2", GE.kernels),
        key_of("llama", ACLGRAPH.kernels),
        key_of("llama", GE.kernels, torch.float16),
    ]
    assert len(set(keys)) == len(keys)


def test_graphs_of_somebody_s_own_kernels_are_not_kept(tmp_path, monkeypatch, caplog):
    """Their code is not in the key, so another kernel's graph would be found."""
    monkeypatch.setenv("NVA_GRAPH_CACHE", str(tmp_path))
    device = mutated(GE, silu_mul=lambda x: GE.kernels.silu_mul(x))
    with emulation.fp32_arithmetic():
        _, report, found = run("llama", device)
    assert report.deviation < TOLERANCE
    assert len(found) == 2
    assert not list(tmp_path.iterdir())
    assert "those of silu_mul could not be told from others" in caplog.text


def test_graphs_are_kept_and_found_again(tmp_path, monkeypatch):
    """With NVA_GRAPH_CACHE a second engine compiles nothing and computes the same; another model
    compiles its own."""
    monkeypatch.setenv("NVA_GRAPH_CACHE", str(tmp_path))
    with emulation.fp32_arithmetic():
        runs = [run(name, GE) for name in ("llama", "llama", "qwen2", models.SEEING, models.SEEING)]
    assert [len(found) for _, _, found in runs] == [2, 0, 2, 2, 0]
    assert all(report.deviation < TOLERANCE for _, report, _ in runs)
