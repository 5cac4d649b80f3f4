"""The benchmarks measure what they say: fixed workloads, every request answered, figures that add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.prefix import with_goals
from nva import bench
from tests.checkpoints import CASES, build


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("llama")
    build(CASES["llama"], folder)
    return bench.open_model(str(folder), "float32", device="cpu", n_blocks=40, max_rows=4, max_model_len=24)


def small(workload: bench.Workload) -> bench.Workload:
    """The workload in ids of a tiny vocabulary."""
    prompts = [[token % 97 for token in prompt] for prompt in workload.prompts]
    return bench.Workload(prompts=prompts, output_lens=workload.output_lens)


def test_workloads_are_the_same_every_time() -> None:
    first, again = (bench.random_workload(0, 3, (2, 5), (1, 4)) for _ in range(2))
    assert first == again
    assert all(2 <= len(prompt) <= 5 for prompt in first.prompts)
    assert all(1 <= n <= 4 for n in first.output_lens)
    shared = bench.shared_workload(3, 4, 10, 2, 1).prompts
    assert len({tuple(prompt[:10]) for prompt in shared}) == 1
    assert len(set(map(tuple, shared))) == 4


def test_serving_answers_all_and_accounts_for_its_time(engine) -> None:
    workload = small(bench.random_workload(0, 6, (2, 9), (1, 8)))
    report = bench.serve(engine, workload)
    assert sum(step.n_tokens for step in report.steps) == report.n_total - len(workload.prompts)
    assert all(0 < first <= last <= report.seconds for first, last in zip(report.first, report.last, strict=True))
    assert sum(sum(step.seconds.values()) for step in report.steps) <= report.seconds
    assert 0 < report.host_share < 1
    assert 0 < sum(report.shares.values()) <= 1
    assert all(0 < step.slots_used <= step.slots_taken for step in report.steps)


def test_a_shared_prefix_is_computed_once(engine) -> None:
    report = bench.serve(engine, small(bench.shared_workload(3, 4, 16, 2, 1)))
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
def test_a_goal_says_by_how_much_it_is_missed(figure: float, wanted: dict[str, float], line: str) -> None:
    assert bench.goal(figure, **wanted) == line


def test_the_work_of_a_prompt_is_what_a_sum_over_its_matrices_gives(engine) -> None:
    hidden, inner, q, kv, vocab, n = 48, 72, 6 * 8, 2 * 8, 97, 5
    products = (q + 2 * kv) * hidden + hidden * q + 3 * inner * hidden + 2 * hidden  # and the norms
    attention = sum(4 * q * length for length in range(1, n + 1))
    expected = 2 * (2 * n * products + attention) + 2 * vocab * hidden  # the last token's logits only
    assert bench.prefill_operations(engine, n) == expected


def test_keys_and_values_of_a_token_are_counted_in_every_layer(engine) -> None:
    assert bench.kv_bytes(engine) == 2 * 2 * 2 * 8 * 4


def test_a_request_that_joins_a_prefix_costs_no_more_than_those_before() -> None:
    row = {"requests": 2, "seconds": 1.0, "computed": 10, "unique tokens": 10, "prefix cache": True}
    more = [row, row | {"requests": 4, "seconds": 1.5}, row | {"requests": 5, "seconds": 1.8, "computed": 12}]
    found = with_goals(more)
    assert [row["goal: ms"] for row in found] == ["none", "<= 550: met", "<= 275: missed by 9.09 %"]
    assert [row["goal: computed"] for row in found] == ["<= 10: met", "<= 10: met", "<= 10: missed by 20 %"]


def test_tables_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": "a", "n": 3, "x": 1234.5}, {"name": "b", "n": 10, "x": 0.5}]
    bench.show("title", rows, str(tmp_path / "figures.json"))
    assert capsys.readouterr().out == "title\nname   n     x\n   a   3  1234\n   b  10   0.5\n"
    assert json.loads((tmp_path / "figures.json").read_text())["rows"] == rows
