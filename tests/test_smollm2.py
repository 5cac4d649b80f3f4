"""SmolLM2-135M-Instruct, real weights on the CPU: transformers' tokens, and the same tokens however
they are served."""

from collections import Counter

import attrs
import pytest
import torch
from transformers import AutoModelForCausalLM

import nva
from nva.forward import empty_kv, make_forward
from nva.kernels import backend
from nva.loading.find import demo_folder
from nva.state.blocks import free_ids
from nva.state.engine import check, empty
from nva.steps.schedule import schedule

pytestmark = pytest.mark.slow

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "1, 2, 3, 4,",
    "Water boils at",
    "To be, or not to be,",
    "The three laws of robotics are",
    "Dear Sir or Madam,",
    "import numpy as np\n",
    "El perro corre por",
    "In 1969, humans first",
    "A recipe for bread: take",
    "Q: What is photosynthesis?\nA:",
    "SELECT name FROM users WHERE",
    "The quick brown fox jumps over the lazy dog. " * 6 + "Then",
    "Roses are red,",
    "My favourite colour is",
    "The derivative of x^2 is",
    "\u65e5\u672c\u306e\u9996\u90fd\u306f",
    "Emoji: \U0001f600",
    "x",
    "List of countries in Europe:\n1.",
]
LONG = "You are a careful assistant who answers in one short sentence and never repeats a word. "
REQUESTS = [LONG * (1 + i % 2) + text for i, text in enumerate(PROMPTS[:16])]
PARAMS = [
    nva.SamplingParams(
        temperature=0 if i % 2 else 0.9, top_p=0.95, seed=i, max_tokens=16, n=1 + (i % 5 == 0)
    )
    for i in range(16)
]


@pytest.fixture(scope="module")
def engine() -> nva.Engine:
    return nva.load(demo_folder(), dtype="float32", max_model_len=512, n_blocks=600, max_rows=32)


@pytest.fixture(scope="module")
def reference():
    return AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32)


def served_by(engine: nva.Engine, **limits) -> nva.Engine:
    """An engine of the same weights with other limits."""
    sizes, spec = attrs.evolve(engine.state.limits, **limits), engine.checkpoint.spec
    return attrs.evolve(
        engine,
        state=empty(sizes),
        kv=empty_kv(spec, sizes, torch.float32),
        forward=make_forward(spec, sizes, backend("cpu")),
    )


def greedy(model, ids: list[int], n: int) -> list[int]:
    out = model.generate(torch.tensor([ids]), max_new_tokens=n, do_sample=False, pad_token_id=0)
    return out[0, len(ids) :].tolist()


def test_greedy_tokens_are_transformers(engine, reference) -> None:
    """22 prompts decoded together, 64 tokens each, float32."""
    answers = nva.generate(engine, PROMPTS, nva.SamplingParams(temperature=0, max_tokens=64))
    for answer in answers:
        assert list(answer.token_ids) == greedy(reference, list(answer.prompt_token_ids), 64)


def test_first_logits_are_transformers(engine, reference) -> None:
    """Log-probabilities of the whole vocabulary after the prompt, within 1e-3."""
    params = nva.SamplingParams(temperature=0, max_tokens=1, logprobs=49152)
    for answer in nva.generate(engine, PROMPTS[:5], params):
        with torch.no_grad():
            expected = (
                reference(torch.tensor([answer.prompt_token_ids])).logits[0, -1].log_softmax(-1)
            )
        tokens, logprobs = zip(*answer.logprobs[0].top, strict=True)
        assert torch.allclose(torch.tensor(logprobs), expected[list(tokens)], atol=1e-3)


def test_the_chat_answer_is_paris(engine) -> None:
    prompt = {
        "messages": [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
    }
    (answer,) = nva.generate(engine, prompt, nva.SamplingParams(temperature=0))
    assert (answer.text, answer.finish_reason) == ("The capital of France is Paris.", "stop")


@pytest.fixture(scope="module")
def expected(engine) -> list:
    """Each request's tokens when it is served alone, without a prefix cache."""
    alone = served_by(engine, prefix_caching=False)
    return [tokens(nva.generate(alone, *pair)) for pair in zip(REQUESTS, PARAMS, strict=True)]


def tokens(answers: list[nva.Completion]) -> list:
    return [sample.token_ids for answer in answers for sample in answer.samples]


CONFIGURATIONS = {
    "big pool, whole prompts": {},
    "no prefix cache": {"prefix_caching": False, "max_batched_tokens": 64},
    "tiny pool, whole prompts": {"n_blocks": 14},
    "tiny pool, chunks of 64": {"n_blocks": 14, "max_batched_tokens": 64, "prefix_caching": False},
    "tiny pool, chunks of 7": {"n_blocks": 9, "max_batched_tokens": 7},
    "chunks of 7": {"max_batched_tokens": 7, "max_rows": 5},
    "chunks of 1": {"max_batched_tokens": 1},
}


@pytest.mark.parametrize("limits", CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())
def test_tokens_do_not_depend_on_how_they_are_served(engine, expected, limits) -> None:
    """Transparency: 16 requests together, greedy and seeded, against each alone. What should happen
    did happen."""
    seen: Counter[str] = Counter()

    def counted(state):
        state, plan = schedule(state)
        n_chunks = int(
            ((plan.counts > 1) & (plan.starts + plan.counts < state.rows.n_known[plan.rows])).sum()
        )
        seen.update(
            preempted=len(plan.preempted), hits=plan.n_hit, copies=len(plan.copies), chunks=n_chunks
        )
        return state, plan

    together = served_by(engine, **limits)
    together.steps = attrs.evolve(together.steps, schedule=counted)
    answers = nva.generate(together, REQUESTS, PARAMS)
    assert tokens(answers) == [each for alone in expected for each in alone]
    check(together.state)
    assert together.state.blocks.n_free == together.state.limits.n_blocks
    assert seen["copies"] > 0
    assert (seen["hits"] > 0) == limits.get("prefix_caching", True)
    assert (seen["preempted"] > 0) == ("n_blocks" in limits)
    if 1 < limits.get("max_batched_tokens", 1) <= 64:
        assert seen["chunks"] > 0


def test_poisoned_free_blocks_change_nothing(engine, expected, monkeypatch) -> None:
    """Whatever block is free and can't be found holds NaN before each step."""
    poisoned = served_by(engine, n_blocks=14, max_batched_tokens=64)
    forward = poisoned.forward

    def spoiling(params, kv, batch):
        blocks = poisoned.state.blocks
        lost = [block for block in free_ids(blocks) if block not in blocks.keys]
        for cache in kv.layers:
            for tensor in cache:
                tensor[lost] = float("nan")
        return forward(params, kv, batch)

    monkeypatch.setattr(poisoned, "forward", torch.inference_mode()(spoiling))
    assert tokens(nva.generate(poisoned, REQUESTS, PARAMS)) == [
        each for alone in expected for each in alone
    ]


def test_bfloat16_is_as_near_to_float32_as_transformers_is(engine, reference) -> None:
    """Rounding to bf16 moves the logits; ours must not move further from float32 than transformers'
    own bf16 ones."""
    ours = nva.load(demo_folder(), dtype="bfloat16", max_model_len=512, n_blocks=600)
    theirs = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.bfloat16)
    params = nva.SamplingParams(temperature=0, max_tokens=1, logprobs=49152)
    errors = []
    for answer in nva.generate(ours, PROMPTS, params):
        ids = torch.tensor([answer.prompt_token_ids])
        with torch.no_grad():
            exact, rounded = (
                model(ids).logits[0, -1].float().log_softmax(-1) for model in (reference, theirs)
            )
        found = torch.empty_like(exact)
        order, logprobs = zip(*answer.logprobs[0].top, strict=True)
        found[list(order)] = torch.tensor(logprobs)
        errors.append([(found - exact).square().mean(), (rounded - exact).square().mean()])
    our_error, their_error = torch.tensor(errors).mean(0).sqrt().tolist()
    assert our_error < 1.25 * their_error
    assert their_error < 0.5  # of log-probabilities whose standard deviation is about 3
