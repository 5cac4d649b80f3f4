"""Every family through the whole engine: transformers' greedy tokens, and the same when the engine
is pressed hard.

A pool too small for all requests preempts them in the middle; a common prefix is found; tokens come
one, a few or all at a time; what is decoded and what is prefilled mix."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

import nva
from nva.state.engine import check
from nva.steps.schedule import schedule
from tests.checkpoints import CASES, build
from tests.models.parity import logits_of

NAMES = [
    "llama-llama3",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3",
    "qwen2_moe",
    "qwen3_moe-idle",
    "qwen3_moe-layers",
]
RANDOM = np.random.default_rng(0)
PREFIX = RANDOM.integers(0, 97, 8).tolist()
PROMPTS = [PREFIX + RANDOM.integers(0, 97, n).tolist() for n in (1, 3, 5, 7)]
GREEDY = nva.SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
SIZES = {"dtype": "float32", "device": "cpu", "block_size": 4, "max_rows": 4, "max_model_len": 24}
PRESSED = {
    "at ease": {"n_blocks": 64},
    "few blocks": {"n_blocks": 12},
    "few blocks, few tokens": {"n_blocks": 12, "max_batched_tokens": 5},
    "few tokens": {"n_blocks": 64, "max_batched_tokens": 7},
}


@pytest.fixture(scope="module", params=NAMES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]]]:
    """A checkpoint, and the tokens that transformers answers to PROMPTS."""
    folder = tmp_path_factory.mktemp(request.param)
    model = build(CASES[request.param], folder)
    answers = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(GREEDY.max_tokens or 0):
            tokens.append(int(logits_of(model, np.array(tokens))[-1].argmax()))
        answers.append(tokens[len(prompt) :])
    return folder, answers


@pytest.mark.parametrize("limits", PRESSED.values(), ids=PRESSED)
def test_tokens_are_transformers(
    served: tuple[Path, list[list[int]]], limits: dict[str, int]
) -> None:
    seen: Counter[str] = Counter()

    def counted(state):
        state, plan = schedule(state)
        is_cut = (plan.counts > 1) & (plan.starts + plan.counts < state.rows.n_known[plan.rows])
        seen.update(preempted=len(plan.preempted), hits=plan.n_hit, cut=int(is_cut.sum()))
        return state, plan

    folder, expected = served
    engine = nva.load(folder, **SIZES, **limits)
    engine.steps = attrs.evolve(engine.steps, schedule=counted)
    answers = nva.generate(engine, PROMPTS, GREEDY)
    assert [list(answer.token_ids) for answer in answers] == expected
    check(engine.state)
    assert seen["hits"] > 0
    assert (seen["preempted"] > 0) == (limits["n_blocks"] == 12)
    assert (seen["cut"] > 0) == ("max_batched_tokens" in limits)
    assert torch.is_grad_enabled()
