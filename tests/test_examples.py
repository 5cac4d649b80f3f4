"""The examples are right: beam search as in transformers, policy and scheduler as they promise, the
tour as printed."""

from __future__ import annotations

import doctest
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import nva
from examples import beam_search as beam_search_example
from examples import compose as compose_example
from examples import own_kernel as kernel
from examples import own_sampler as sampler
from examples import own_scheduler as scheduler
from examples import test_your_scheduler as scheduler_example
from examples.beam_search import REQUEST_ID, advance, beam_search, begin
from examples.compose import fair, serve
from nva.kernels import Kernels, reference
from nva.state.engine import check
from nva.state.plan import Draw, Sampled
from nva.state.policy import first_come_first_served
from nva.state.request import request
from nva.steps.apply import abort
from nva.testing import Arrive
from tests.checkpoints import CASES, build
from tests.steps.test_sample import draw_of

BLOCK_SIZE, N_BLOCKS, MAX_TOKENS = 4, 40, 12
PROMPTS = [
    np.random.default_rng(i).integers(0, 97, length).tolist() for i, length in enumerate((1, 7, 8))
]
STOPS = {"one": {2}, "some": {5, 11, 40}, "many": {*range(0, 97, 4)}}

GREEDY = nva.SamplingParams(temperature=0, max_tokens=12)

Models = tuple[nva.Engine, PreTrainedModel]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint without a tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    build(CASES["llama"], folder)
    return folder


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A checkpoint in our engine, whose budget of 6 tokens cuts longer prompts into chunks, and in
    transformers."""
    folder = tmp_path_factory.mktemp(request.param)
    model = build(CASES[request.param], folder)
    return nva.load(
        folder, block_size=BLOCK_SIZE, n_blocks=N_BLOCKS, max_rows=6, max_batched_tokens=6
    ), model


def expected(
    model: PreTrainedModel, prompt: list[int], stop_ids: set[int], **options: Any
) -> list[tuple[int, ...]]:
    """All outputs of transformers' beam search, best first, without what it pads them with."""
    ids = torch.tensor([prompt])
    options |= {
        "attention_mask": torch.ones_like(ids),
        "pad_token_id": 0,
        "eos_token_id": sorted(stop_ids),
    }
    found = model.generate(
        ids, do_sample=False, num_return_sequences=options["num_beams"], **options
    )
    outputs = found[:, len(prompt) :].tolist()
    ends = [
        next((i for i, token in enumerate(output) if token in stop_ids), len(output))
        for output in outputs
    ]
    return [tuple(output[: end + 1]) for output, end in zip(outputs, ends, strict=True)]


def test_beam_search_finds_what_transformers_finds(models: Models) -> None:
    """All beams, in order, for several widths, penalties and sets of stop ids; some stop, some
    reach the length."""
    engine, model = models
    endings = Counter[bool]()
    for prompt, stop_ids in zip(PROMPTS, STOPS.values(), strict=True):
        engine.eos_ids = frozenset(stop_ids)
        for n_beams in (2, 3, 6):
            for penalty in (0.0, 1.0, 2.0, -1.0):
                options = {
                    "num_beams": n_beams,
                    "length_penalty": penalty,
                    "max_new_tokens": MAX_TOKENS,
                }
                answers = beam_search(engine, prompt, n_beams, MAX_TOKENS, penalty)
                assert [found.token_ids for found in answers] == expected(
                    model, prompt, stop_ids, **options
                )
                endings.update(found.token_ids[-1] in stop_ids for found in answers)
    assert endings[True]
    assert endings[False]


def test_one_beam_is_greedy(models: Models) -> None:
    engine, _ = models
    engine.eos_ids = frozenset({5, 11, 40})
    for prompt in PROMPTS:
        (found,) = beam_search(engine, prompt, 1, MAX_TOKENS)
        (greedy,) = nva.generate(
            engine, [prompt], nva.SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        )
        assert found.token_ids == greedy.token_ids


def test_beams_share_blocks_and_return_all(models: Models) -> None:
    engine, n_beams, prompt = models[0], 6, PROMPTS[2]
    engine.eos_ids = frozenset()
    search, seen = begin(engine, prompt, n_beams, MAX_TOKENS), list[tuple[int, int]]()
    while not search.is_over:
        search = advance(engine, search)
        check(engine.state)
        rows, counts = engine.state.rows, engine.state.blocks.ref_counts
        if rows.is_running.sum() == n_beams:
            assert (counts == n_beams).sum() >= len(prompt) // BLOCK_SIZE
            seen.append((int((counts > 0).sum()), int(rows.n_blocks[rows.is_running].sum())))
    assert len(seen) == MAX_TOKENS - 1  # at the last token the rows end
    assert all(n_held < n_entries for n_held, n_entries in seen)
    engine.state, _ = abort(engine.state, [REQUEST_ID])
    assert engine.state.blocks.n_free == N_BLOCKS


def test_beam_search_returns_its_blocks_when_it_fails(models: Models) -> None:
    engine, forward = models[0], models[0].forward

    def fail_once(*args: Any) -> Any:
        engine.forward = forward
        raise RuntimeError("the device failed")

    engine.forward = fail_once
    with pytest.raises(RuntimeError, match="device failed"):
        beam_search(engine, PROMPTS[0], 2, MAX_TOKENS)
    assert engine.state.blocks.n_free == N_BLOCKS
    assert beam_search(engine, PROMPTS[0], 2, MAX_TOKENS)


@pytest.mark.parametrize("n_beams", [0, 7])
def test_beams_that_do_not_fit_are_refused(models: Models, n_beams: int) -> None:
    with pytest.raises(ValueError, match=f"{n_beams} beams need"):
        beam_search(models[0], PROMPTS[0], n_beams)


def test_fair_queueing_serves_a_light_user_early_and_changes_no_token(models: Models) -> None:
    engine, _ = models
    ids = ["ann/0", "ann/1", "ann/2", "ann/3", "ann/4", "ann/5", "ann/6", "bob/0"]
    requests = [
        request(id_, [i, 3, 5], nva.SamplingParams(temperature=0, max_tokens=6, tag=id_[:3]))
        for i, id_ in enumerate(ids)
    ]
    runs = {
        policy.name: serve(engine, policy, requests) for policy in (first_come_first_served, fair)
    }
    finished = {
        name: [found for output in outputs for found in output.finished]
        for name, outputs in runs.items()
    }
    tokens = {
        name: {found.request.id: found.token_ids for found in order}
        for name, order in finished.items()
    }
    assert tokens["fcfs"] == tokens["fair"]
    order = {name: [found.request.id for found in found] for name, found in finished.items()}
    assert order["fcfs"].index("bob/0") >= 6
    assert order["fair"].index("bob/0") < 6


def test_the_loop_by_hand_samples_by_the_engine_s_own_sampler(models: Models) -> None:
    engine, calls = models[0], list[int]()
    plain = engine.steps

    def counted(logits: Any, draw: Any) -> Any:
        calls.append(len(draw.positions))
        return plain.sample(logits, draw)

    engine.steps = attrs.evolve(plain, sample=counted)
    ask = nva.SamplingParams(temperature=1.0, top_p=0.5, seed=1, max_tokens=3)
    serve(engine, first_come_first_served, [request("ann/0", [1, 2, 3], ask)])
    engine.steps = plain
    assert calls == [1, 1, 1]


# Steps and kernels of one's own


def test_a_scheduler_of_ones_own_is_served_and_changes_no_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "CHUNK", 2)
    prompts = [[1, 2, 3], [i * 7 % 97 for i in range(18)]]
    sizes, tokens = [], []
    for steps in (nva.Steps(), nva.Steps(schedule=scheduler.gentle)):
        engine = nva.load(folder, steps=steps, max_batched_tokens=8)
        sizes.append(scheduler.largest_step(engine, prompts, max_tokens=6))
        answers = nva.generate(engine, prompts, nva.SamplingParams(temperature=0, max_tokens=6))
        tokens.append([answer.token_ids for answer in answers])
    assert sizes == [8, 3]
    assert tokens[0] == tokens[1]


def test_a_sampler_of_ones_own_leaves_out_what_it_says(folder: Path) -> None:
    """The tokens left are those of top-n-sigma; where one is left, the answer is greedy."""
    seen: list[tuple[torch.Tensor, np.ndarray]] = []

    def watched(logits: torch.Tensor, draw: Draw) -> Sampled:
        sampled = sampler.top_n_sigma(logits, draw)
        seen.append((logits[draw.logit_rows.tolist()], sampled.tokens))
        return sampled

    engine = nva.load(folder, steps=nva.Steps(sample=watched))
    nva.generate(engine, [PROMPTS[1]] * 40, nva.SamplingParams(temperature=3.0, max_tokens=20))
    logits = torch.cat([x for x, _ in seen])
    drawn = logits.gather(1, torch.tensor(np.concatenate([y for _, y in seen]))[:, None].long())
    below = (logits.amax(-1, keepdim=True) - drawn) / logits.std(-1, keepdim=True)
    assert 0.5 < below.max() <= sampler.N_SIGMA


def test_a_sampler_that_remembers_has_a_bound_for_each_sample(folder: Path) -> None:
    """What it remembers of one is nothing to another, so an answer is the same in any batch."""
    engine = nva.load(folder, steps=nva.Steps(sample=sampler.mirostat))
    params = nva.SamplingParams(temperature=1.0, max_tokens=12, seed=3, n=2)
    (found,) = nva.generate(engine, [PROMPTS[1]], params)
    bounds = engine.state.sampler_state
    assert len(bounds) == 2
    assert len({round(bound, 6) for bound in bounds.values()}) == 2
    assert found.samples[0].token_ids != found.samples[1].token_ids
    beside = nva.load(folder, steps=nva.Steps(sample=sampler.mirostat))
    _, again = nva.generate(beside, [PROMPTS[0], PROMPTS[1]], params)
    tokens = [[sample.token_ids for sample in each.samples] for each in (found, again)]
    assert tokens[0] == tokens[1]


def test_mirostat_moves_its_bound_towards_the_target() -> None:
    """By hand: of two tokens with 1/4 and 3/4, the likelier surprises by log(4/3) nats."""
    logits = torch.tensor([[1.0, 3.0]]).log()
    draw = draw_of([0], temperature=0)
    bounds, sampled = sampler.mirostat_step({}, logits, draw)
    assert sampled.tokens.tolist() == [1]
    moved = 2 * sampler.TARGET - sampler.RATE * (np.log(4 / 3) - sampler.TARGET)
    assert list(bounds.values()) == [pytest.approx(moved)]
    tight = dict.fromkeys(bounds, 1.0)  # log(4) is beyond it, so the other can't be drawn
    for position in range(50):
        _, sampled = sampler.mirostat_step(tight, logits, draw_of([0], positions=position))
        assert sampled.tokens.tolist() == [1]


def test_a_kernel_of_ones_own_is_served_and_a_wrong_one_refused(folder: Path) -> None:
    expected = nva.generate(nva.load(folder), PROMPTS, GREEDY)
    engine = nva.load(folder, kernels=kernel.with_mine)
    found = nva.generate(engine, PROMPTS, GREEDY)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    with pytest.raises(RuntimeError, match="computes something else than the reference"):
        nva.load(folder, kernels=kernel.with_wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "lines"),
    [
        (scheduler, ("schedule: steps of up to 256 tokens", "gentle: steps of up to 17 tokens")),
        (sampler, ("top-n-sigma: '", "mirostat: '")),
        (kernel, ("with_mine: ' Paris.", "with_wrong: refused: ")),
        (compose_example, ("fcfs: Bob gets ' Paris", "fair: Bob gets ' Paris")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_example_runs_from_the_command_line(
    demo_model: Path,
    module: Any,
    lines: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("NVA_MODEL", str(demo_model))
    monkeypatch.setattr(sys, "argv", ["example"])
    module.main()
    shown = capsys.readouterr().out
    for line in lines:
        assert line in shown


BAD = {
    "beam_search.py x --beams 0": "max_rows is 0; give a whole number",
    "beam_search.py  --beams 2": "the prompt is []; give at least one token id",
    "beam_search.py x --max-tokens 600": "the engine has 4 rows",
    "beam_search.py x --max-tokens 0": "max_tokens is 0; give a whole number",
    "beam_search.py x --length-penalty nan": "length_penalty is nan; give a number in [-9, 9]",
    "beam_search.py x --length-penalty 1e9": "length_penalty is 1000000000.0",
    "beam_search.py x --model no/such/folder": "there is no folder no/such/folder",
    "compose.py --model no/such/folder": "there is no folder no/such/folder",
}


@pytest.mark.parametrize("line", BAD)
def test_a_mistake_on_an_example_s_command_line_is_said(
    demo_model: Path, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NVA_MODEL", str(demo_model))
    monkeypatch.setattr(sys, "argv", line.split(" "))
    module = beam_search_example if line.startswith("beam") else compose_example
    with pytest.raises(SystemExit, match="2"):
        module.main()
    last = capsys.readouterr().err.splitlines()[-1]
    assert ": error: " in last
    assert BAD[line] in last


@pytest.mark.parametrize(
    ("prefix_caching", "law"), [(False, "slots that nobody wrote"), (True, "key identity")]
)
def test_the_laws_tell_a_right_scheduler_from_a_wrong_one(prefix_caching: bool, law: str) -> None:
    """The case that the example shrinks to: a prompt's first chunk goes with another request's
    last."""
    size = nva.Limits(
        vocab_size=7,
        max_model_len=4,
        n_blocks=4,
        block_size=1,
        max_rows=2,
        max_batched_tokens=2,
        prefix_caching=prefix_caching,
    )
    params = nva.SamplingParams(temperature=0, max_tokens=1)
    case = size, [Arrive((request(0, [0], params),)), Arrive((request(1, [1, 0], params),))]
    assert law in (scheduler_example.broken_law(case, scheduler_example.cross_out) or "")
    assert scheduler_example.broken_law(case, scheduler_example.hold_back) is None


@pytest.mark.slow
def test_the_scheduler_example_shrinks_to_two_requests(capsys: pytest.CaptureFixture[str]) -> None:
    scheduler_example.main()
    shown = capsys.readouterr().out
    assert shown.count("arrive") == 2
    assert "slots that nobody wrote" in shown
    assert "hold_back: every law holds" in shown


@pytest.mark.slow
def test_the_tour_prints_what_it_says(demo_model: Path) -> None:
    assert demo_model.is_dir()
    results = doctest.testfile(
        str(Path(__file__).parents[1] / "docs/tour.md"), module_relative=False
    )
    assert results.attempted > 30
    assert results.failed == 0


QUESTION = {
    "messages": [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
}


def beginning(own: Kernels) -> Kernels:
    """What lies in the cache, by the reference's functions together; a new attention begins so."""
    together = ("write_kv", "copy_blocks", "attention_inputs", "attention")
    return attrs.evolve(own, **{name: getattr(reference.KERNELS, name) for name in together})


@pytest.mark.slow
def test_a_kernel_of_ones_own_serves_as_the_page_on_operators_says(demo_model: Path) -> None:
    """All its ways: the snippet, the functions that are replaced together, the reference's all."""
    assert demo_model.is_dir()
    page = (Path(__file__).parents[1] / "docs/custom_op.md").read_text()
    found: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], found)
    engines = [
        found["engine"],
        nva.load(kernels=beginning),
        nva.load(kernels=attrs.evolve(reference.KERNELS, rotary=found["rotary_pair"])),
    ]
    params = nva.SamplingParams(temperature=0, max_tokens=20)
    for engine in engines:
        for completion in nva.generate(engine, [QUESTION] * 4, params):
            assert completion.text == "The capital of France is Paris."
