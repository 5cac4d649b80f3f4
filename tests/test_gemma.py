"""Gemma 3 270M, real weights on the CPU: transformers' tokens, alone and among others, beyond the
window too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import nva

pytestmark = pytest.mark.slow

LONG = "The lighthouse keeper wrote in his diary every evening, and every evening the sea had taken another stone. "
PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "1, 2, 3, 4,",
    "El perro corre por",
    LONG * 28 + "On the last page",  # 560 tokens and more: the window is 512
]


@pytest.fixture(scope="module")
def engine(gemma_model: Path) -> nva.Engine:
    return nva.load(
        gemma_model, dtype="float32", max_model_len=1024, max_rows=8, max_batched_tokens=100
    )


def test_greedy_tokens_are_transformers(engine: nva.Engine, gemma_model: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(gemma_model, dtype=torch.float32)
    answers = nva.generate(
        engine, PROMPTS, nva.SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    )
    assert len(answers[-1].prompt_token_ids) > 512
    for answer in answers:
        ids = torch.tensor([answer.prompt_token_ids])
        expected = reference.generate(ids, max_new_tokens=32, min_new_tokens=32, do_sample=False)
        assert list(answer.token_ids) == expected[0, ids.shape[1] :].tolist()


def test_the_sky_is_blue(engine: nva.Engine) -> None:
    (answer,) = nva.generate(
        engine, "The sky is blue. The colour of the sky is", nva.SamplingParams(temperature=0)
    )
    assert answer.text.startswith(" blue")
