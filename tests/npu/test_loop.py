"""Rung e: the whole engine on device "npu", with emulated operators as the device and a seam where
tensors live.

Not run here, ever: placement of tensors, memory asked of a device, capture and replay. docs/npu.md
has the list."""

from __future__ import annotations

import attrs
import pytest
import torch

import nva
from nva import forward
from nva.kernels.npu import device, devices, operators
from nva.loading.check import self_check
from nva.loading.warm_up import shapes
from nva.models.registry import EMULATED, VERIFIED
from nva.steps.pack import pack
from tests.devices import mutated
from tests.npu import here, lowering
from tests.npu.models import CONFIGS, tiny_spec
from tests.test_images import picture, prompt, servable, text

PROMPTS = ["The capital of France is", "One, two, three, four,"]
SMALL = {"max_model_len": 256, "max_rows": 4, "max_batched_tokens": 64}


@pytest.fixture
def emulated_device(monkeypatch):
    """The seam: tensors stay on the CPU, which has this much memory."""
    monkeypatch.setattr(device, "place", lambda _: torch.device("cpu"))
    monkeypatch.setattr(device, "free_memory", lambda _: 3 << 30)


def answers(model, **options):
    engine = nva.load(str(model), **SMALL, **options)
    return engine, nva.generate(
        engine, PROMPTS, nva.SamplingParams(temperature=0, max_tokens=12, logprobs=2)
    )


def n_certain(answer):
    """Tokens up to the first whose rival is as likely, as far as bfloat16 can tell."""
    margins = [entry.top[0][1] - entry.top[1][1] for entry in answer.logprobs]
    return next((i for i, margin in enumerate(margins) if margin < 0.3), len(margins))


def test_real_text_in_eager_mode(demo_model, emulated_device):
    engine, found = answers(demo_model, device="npu", dtype="bfloat16", graph="eager")
    assert "Paris" in found[0].text
    assert "five" in found[1].text
    limits = engine.state.limits
    assert limits.block_size == 128
    assert limits.n_blocks == 4 * 2, "what four rows of full length need"
    for answer, expected in zip(
        found, answers(demo_model, device="cpu", dtype="bfloat16")[1], strict=True
    ):
        n = n_certain(expected)
        assert n >= 4
        assert answer.token_ids[:n] == expected.token_ids[:n]


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["ge", "aclgraph"])
def test_real_text_from_graphs(demo_model, emulated_device, graph):
    """Every shape is compiled before the first request, none after it."""
    with lowering.caught() as found:
        engine = nva.load(str(demo_model), **SMALL, device="npu", dtype="bfloat16", graph=graph)
        n_compiled = len(found)
        text = nva.generate(engine, PROMPTS, nva.SamplingParams(temperature=0, max_tokens=6))[
            0
        ].text
    assert "Paris" in text
    assert len(found) == n_compiled
    assert n_compiled >= len(shapes(engine.state.limits))


def test_memory_decides_the_size_of_the_cache(demo_model, emulated_device, monkeypatch):
    monkeypatch.setattr(
        device, "free_memory", lambda _: (2 << 30) + (20 << 20)
    )  # 20 MiB beyond what is reserved
    engine, _ = answers(demo_model, device="npu", dtype="bfloat16", graph="eager")
    block_bytes = 2 * 30 * 128 * 3 * 64 * 2
    assert engine.state.limits.n_blocks == (20 << 20) // block_bytes


def test_float32_is_refused(demo_model, emulated_device):
    with pytest.raises(ValueError, match="dtype is float32.*give bfloat16 or float16"):
        nva.load(str(demo_model), device="npu", dtype="float32")


def test_a_device_that_computes_nonsense_is_refused(demo_model, emulated_device, monkeypatch):
    """As a stack does that ignores the mask beyond 512 tokens."""
    whole = operators.attention

    def forgetful(q, *args):
        out = whole(q, *args)
        return torch.where(torch.arange(len(q))[:, None, None] > 512, out.mean(0), out)

    monkeypatch.setattr(devices, "EAGER", mutated(devices.EAGER, attention=forgetful))
    with pytest.raises(nva.DeviceError, match="computes something else than the reference"):
        nva.load(str(demo_model), device="npu", dtype="bfloat16", graph="eager")


@pytest.fixture(scope="module")
def seeing_model(tmp_path_factory):
    """Qwen3-VL with heads that the attention kernel takes."""
    rope = {
        "rope_type": "default",
        "rope_theta": 500.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    }
    return servable(tmp_path_factory.mktemp("qwen3_vl"), head_dim=32, rope_parameters=rope)


MIXED = [
    prompt(text(0, 6), picture(0), text(1, 3)),
    text(4, 11),
    prompt(picture(1, 30, 12), picture(2), text(2, 2)),
]


def load_small(model, **options):
    """An engine whose steps are shorter than an image."""
    return nva.load(
        str(model), max_model_len=80, max_rows=4, max_batched_tokens=12, dtype="float16", **options
    )


def logprobs(engine):
    """Of the tokens of texts and images mixed, and of what follows them."""
    params = nva.SamplingParams(
        temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=0, logprobs=0
    )
    answers = nva.generate(engine, MIXED, params)
    entries = [
        entry for answer in answers for entry in (*answer.prompt_logprobs[1:], *answer.logprobs)
    ]
    return torch.tensor([entry.logprob for entry in entries])


@pytest.mark.parametrize("graph", ["eager", "ge", "aclgraph"])
def test_images_and_texts_together(seeing_model, emulated_device, monkeypatch, graph):
    encode, n_patches, cut = forward.encode_image, [], []

    def watched_encode(spec, kernels, params, image, device):
        n_patches.append(len(image.patches))
        return encode(spec, kernels, params, image, device)

    def watched_pack(state, plan):
        batch, draw = pack(state, plan)
        cut.extend(span.count < span.image.n_tokens for span in batch.images)
        return batch, draw

    monkeypatch.setattr(forward, "encode_image", watched_encode)
    with lowering.caught() as found:
        engine = load_small(seeing_model, device="npu", graph=graph)
        assert n_patches[-1] == 4 * 16, (
            "the largest that the processor makes, when memory was measured"
        )
        engine.steps = attrs.evolve(engine.steps, pack=watched_pack)
        n_compiled = len(found)
        ours = logprobs(engine)
    assert len(found) == n_compiled
    assert set(cut) == {True, False}, "some images are cut, some are not"
    expected = logprobs(load_small(seeing_model, device="cpu"))
    assert float((ours - expected).abs().max() / expected.std()) < 0.1


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_passes_the_check_at_start(name):
    for dtype in here.EAGER.dtypes:
        self_check(tiny_spec(name), here.EAGER, dtype)


def test_every_family_that_claims_it_has_a_model_in_these_tests():
    claimed = {name for name, claims in VERIFIED.items() if EMULATED in claims}
    assert {architecture for architecture, _ in CONFIGS.values()} == claimed
