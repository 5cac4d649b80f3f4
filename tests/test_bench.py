"""The benchmarks measure what they say: fixed workloads, every request answered, figures that add
up."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest

from bench.prefix import with_goals
from nva import bench
from nva.bench import random_workload
from tests.checkpoints import CASES, build


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("llama")
    build(CASES["llama"], folder)
    return bench.open_model(
        str(folder), "float32", device="cpu", n_blocks=40, max_rows=4, max_model_len=24
    )


def test_workloads_are_the_same_every_time() -> None:
    first, again = (bench.random_workload(0, 3, (2, 5), (1, 4)) for _ in range(2))
    assert first == again
    assert all(2 <= len(prompt) <= 5 for prompt in first.prompts)
    assert all(1 <= n <= 4 for n in first.output_lens)
    shared = bench.shared_workload(3, 4, 10, 2, 1).prompts
    assert len({tuple(prompt[:10]) for prompt in shared}) == 1
    assert len(set(map(tuple, shared))) == 4


@pytest.mark.parametrize("vocab_size", [1, 2, 97, 150, 32_000, 39_999, 40_000, 151_936])
def test_a_workload_fits_any_vocabulary_and_is_the_same_for_large_ones(vocab_size: int) -> None:
    whole = bench.shared_workload(3, 4, 64, 8, 2)
    found = bench.fitted(whole, vocab_size)
    assert all(0 <= token < vocab_size for prompt in found.prompts for token in prompt)
    assert len({tuple(prompt[:64]) for prompt in found.prompts}) == 1
    assert found == whole or vocab_size < 40_000
    assert found != whole or vocab_size > 32_000
    assert found.output_lens == whole.output_lens


def test_serving_answers_all_and_accounts_for_its_time(engine) -> None:
    workload = bench.random_workload(0, 6, (2, 9), (1, 8))
    report = bench.serve(engine, workload)
    assert sum(step.n_tokens for step in report.steps) == report.n_total - len(workload.prompts)
    assert all(
        0 < first <= last <= report.seconds
        for first, last in zip(report.first, report.last, strict=True)
    )
    assert sum(sum(step.seconds.values()) for step in report.steps) <= report.seconds
    assert 0 < report.host_share < 1
    assert 0 < sum(report.shares.values()) <= 1
    assert all(0 < step.slots_used <= step.slots_taken for step in report.steps)


def test_a_shared_prefix_is_computed_once(engine) -> None:
    report = bench.serve(engine, bench.shared_workload(3, 4, 16, 2, 1))
    assert sum(step.n_tokens for step in report.steps) == 16 + 4 * 2


@pytest.mark.parametrize(
    ("figure", "wanted", "line"),
    [
        (1.5, {"at_least": 1.5}, ">= 1.5: met"),
        (1.32, {"at_least": 1.5}, ">= 1.5: missed by 12 %"),
        (0.04, {"at_most": 0.05}, "<= 0.05: met"),
        (0.06, {"at_most": 0.05}, "<= 0.05: missed by 20 %"),
        (1.0, {}, "none"),
    ],
)
def test_a_goal_says_by_how_much_it_is_missed(
    figure: float, wanted: dict[str, float], line: str
) -> None:
    assert bench.goal(figure, **wanted) == line


def test_the_work_of_a_prompt_is_what_a_sum_over_its_matrices_gives(engine) -> None:
    hidden, inner, q, kv, vocab, n = 48, 72, 6 * 8, 2 * 8, 97, 5
    products = (q + 2 * kv) * hidden + hidden * q + 3 * inner * hidden + 2 * hidden  # and the norms
    attention = sum(4 * q * length for length in range(1, n + 1))
    expected = (
        2 * (2 * n * products + attention) + 2 * vocab * hidden
    )  # the last token's logits only
    assert bench.prefill_operations(engine, n) == expected


def test_of_experts_the_active_ones_are_counted(tmp_path: Path) -> None:
    """The second of two layers has 6 experts, of which 3 compute a token."""
    config = {**CASES["qwen3_moe"].config, "num_hidden_layers": 2, "mlp_only_layers": [0]}
    build(attrs.evolve(CASES["qwen3_moe"], config=config), tmp_path)
    engine = bench.open_model(
        str(tmp_path), "float32", device="cpu", n_blocks=40, max_rows=4, max_model_len=24
    )
    hidden, inner, q, kv, vocab, n = 48, 72, 6 * 8, 2 * 8, 97, 5
    common = 2 * ((q + 2 * kv) * hidden + hidden * q + 2 * hidden + 2 * 8)
    active = common + 3 * inner * hidden + 6 * hidden + 3 * 3 * 20 * hidden  # MLP, router, experts
    attention = 2 * sum(4 * q * length for length in range(1, n + 1))
    assert bench.prefill_operations(engine, n) == 2 * n * active + attention + 2 * vocab * hidden
    experts = [engine.params["layers"][1][name] for name in ("experts_gate_up", "experts_down")]
    idle = bench.stored_bytes(experts) / 2
    unread = engine.params["embed"].nbytes + idle
    assert bench.weight_bytes(engine) == bench.stored_bytes(engine.params) - unread


def test_nva_bench_measures_a_model_with_a_small_vocabulary(
    engine, tmp_path: Path, capsys, monkeypatch
) -> None:
    """What it prints, on prompts short enough for a test; Llama 2 and Mistral have 32,000 ids, this
    one 97."""
    monkeypatch.setattr(bench, "open_model", lambda *_, **__: engine)
    monkeypatch.setattr(
        bench, "random_workload", lambda seed, n, *_: random_workload(seed, n, (2, 9), (2, 8))
    )
    bench.quick("anything", "float32", 3)
    assert "one request alone" in capsys.readouterr().out


def test_keys_and_values_of_a_token_are_counted_in_every_layer(engine) -> None:
    assert bench.kv_bytes(engine) == 2 * 2 * 2 * 8 * 4


def test_a_request_that_joins_a_prefix_costs_no_more_than_those_before() -> None:
    row = {"requests": 2, "seconds": 1.0, "computed": 10, "unique tokens": 10, "prefix cache": True}
    more = [
        row,
        row | {"requests": 4, "seconds": 1.5},
        row | {"requests": 5, "seconds": 1.8, "computed": 12},
    ]
    found = with_goals(more)
    assert [row["goal: ms"] for row in found] == ["none", "<= 550: met", "<= 275: missed by 9.09 %"]
    assert [row["goal: computed"] for row in found] == [
        "<= 10: met",
        "<= 10: met",
        "<= 10: missed by 20 %",
    ]


def test_tables_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": "a", "n": 3, "x": 1234.5}, {"name": "b", "n": 10, "x": 0.5}]
    bench.show("title", rows, str(tmp_path / "figures.json"))
    assert capsys.readouterr().out == "title\nname   n     x\n   a   3  1234\n   b  10   0.5\n"
    assert json.loads((tmp_path / "figures.json").read_text())["rows"] == rows
