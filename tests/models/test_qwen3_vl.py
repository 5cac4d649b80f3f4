"""Qwen3-VL against transformers: one to three images of different sizes beside text, in any
chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from nva.kernels.reference import KERNELS as REFERENCE
from nva.models import load_checkpoint, random_params
from nva.models.files import SINGLE
from nva.models.registry import read_model
from nva.models.vision import encode_image
from nva.state.media import Image, Media, Placed, image, media
from tests.checkpoints import randomize
from tests.models.parity import LIMITS, TOLERANCE, Subject, deviation, logits_of

IMAGE, START, END = 90, 92, 93
TEXT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "mrope_section": [4, 3, 2],
        "mrope_interleaved": True,
    },
}
VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 4,
    "patch_size": 4,
    "out_hidden_size": 48,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": 91,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
ROWS = [  # numbers are text tokens, pairs the rows and columns of an image
    [3, (2, 3), 2],
    [2, (1, 4), 1, (3, 2), (2, 3), 3],
    [11],
    [1, (5, 1), 8],
]


MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "mlp_only_layers": [1],
}


def build(folder: Path, has_experts: bool = False, **text: Any) -> PreTrainedModel:
    """A random checkpoint in the folder, with some settings of its text model replaced."""
    text = {**TEXT, **text}
    if has_experts:
        config = Qwen3VLMoeConfig(
            text_config={**MOE, **text}, vision_config=VISION, tie_word_embeddings=True, **TOKENS
        )
    else:
        config = Qwen3VLConfig(text_config=text, vision_config=VISION, **TOKENS)
    config._attn_implementation = "eager"
    model = (
        Qwen3VLMoeForConditionalGeneration if has_experts else Qwen3VLForConditionalGeneration
    )(config).eval()
    randomize(model, seed=0)
    model.save_pretrained(folder)
    return model


def picture(rng: np.random.Generator, n_rows: int, n_columns: int) -> Image:
    patches = rng.normal(size=(n_rows * n_columns * 4, 3 * 2 * 4 * 4)).astype(np.float32)
    return image(patches, n_rows, n_columns)


def prompt(rng: np.random.Generator, parts: list[Any]) -> tuple[np.ndarray, Media | None]:
    """Token ids and media of text and images."""
    ids: list[int] = []
    placed = []
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(0, IMAGE, part).tolist()
        else:
            placed.append(Placed(image=picture(rng, *part), start=len(ids) + 1))
            ids += [START, *[IMAGE] * placed[-1].image.n_tokens, END]
    return np.array(ids), media(placed, len(ids)) if placed else None


@torch.inference_mode()
def expected_logits(model: PreTrainedModel, row: np.ndarray, seen: Media | None) -> Tensor:
    if seen is None:
        return logits_of(model, row)
    ids = torch.from_numpy(row)[None]
    images = [each.image for each in seen.placed]
    return model(
        ids,
        pixel_values=torch.cat([torch.from_numpy(each.patches.copy()) for each in images]),
        image_grid_thw=torch.tensor([[1, 2 * each.n_rows, 2 * each.n_columns] for each in images]),
        mm_token_type_ids=(ids == IMAGE).int(),
        use_cache=False,
    ).logits[0]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return subject_in(tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="module")
def moe_subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return subject_in(tmp_path_factory.mktemp("qwen3_vl_moe"), has_experts=True)


def subject_in(folder: Path, has_experts: bool = False) -> Subject:
    """A random checkpoint in the folder, with what transformers makes of it."""
    model = build(folder, has_experts)
    checkpoint, params = load_checkpoint(folder)
    rng = np.random.default_rng(0)
    rows, seen = zip(*(prompt(rng, parts) for parts in ROWS), strict=True)
    limits = attrs.evolve(LIMITS, position_axes=3)
    expected = [expected_logits(model, *pair) for pair in zip(rows, seen, strict=True)]
    return Subject(
        spec=checkpoint.spec,
        params=params,
        limits=limits,
        rows=list(rows),
        expected=expected,
        media=list(seen),
    )


@pytest.mark.parametrize("chunk", [1, 2, 7, 36])
def test_logits_are_transformers(subject: Subject, chunk: int) -> None:
    assert deviation(subject, chunk) < TOLERANCE


@pytest.mark.parametrize("chunk", [1, 7, 36])
def test_logits_with_experts_are_transformers(moe_subject: Subject, chunk: int) -> None:
    assert [bool(experts) for experts in moe_subject.spec.experts] == [True, False, True]
    assert deviation(moe_subject, chunk) < TOLERANCE


@pytest.mark.parametrize("inner", [20, 24, 48])
def test_experts_are_read_as_the_hub_has_them(inner: int, tmp_path: Path) -> None:
    """Turned, where transformers 5 writes them like other weights. With 24, gate and up together are
    square, with 48 it is down: then the other tells."""
    model = build(tmp_path, has_experts=True, moe_intermediate_size=inner)
    _, expected = load_checkpoint(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    turned = {
        name: tensor.mT.contiguous() if ".experts." in name else tensor
        for name, tensor in tensors.items()
    }
    assert turned["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape[1] == 48
    theirs = model.model.language_model.layers[2].mlp.experts
    assert torch.equal(expected["layers"][2]["experts_gate_up"], theirs.gate_up_proj)
    assert torch.equal(expected["layers"][2]["experts_down"], theirs.down_proj)
    save_file(turned, tmp_path / SINGLE, metadata={"format": "pt"})
    _, found = load_checkpoint(tmp_path)
    for name in ("experts_gate_up", "experts_down"):
        assert torch.equal(found["layers"][2][name], expected["layers"][2][name])


def mutant(subject: Subject, **changed: Any) -> Subject:
    return attrs.evolve(subject, spec=attrs.evolve(subject.spec, **changed))


def assert_caught(faulty: Subject) -> None:
    deviations = [deviation(faulty, chunk) for chunk in (1, 7, 36)]
    assert min(deviations) > 10 * TOLERANCE, deviations


@pytest.mark.parametrize(
    "changed",
    [
        {"deepstack_layers": (2, 0)},
        {"deepstack_layers": (0,)},
        {"rope_theta": 100.0},
        {"n_heads": 2},
    ],
    ids=lambda changed: str(changed),
)
def test_a_fault_of_the_tower_is_caught(subject: Subject, changed: dict[str, Any]) -> None:
    assert_caught(mutant(subject, vision=attrs.evolve(subject.spec.vision, **changed)))


def test_axes_not_interleaved_are_caught(subject: Subject) -> None:
    assert_caught(mutant(subject, rope_axes=tuple(sorted(subject.spec.rope_axes))))


def test_positions_of_text_alone_are_caught(subject: Subject) -> None:
    def flat(seen: Media | None) -> Media | None:
        if seen is None:
            return None
        indices = np.arange(seen.positions.shape[1], dtype=np.int32)
        return attrs.evolve(seen, positions=np.tile(indices, (3, 1)), offset=0)

    assert_caught(attrs.evolve(subject, media=[flat(seen) for seen in subject.media or []]))


def test_images_in_another_order_are_caught(subject: Subject) -> None:
    """The second and third image of a row are of equal size."""
    seen = list(subject.media or [])
    first, second, third = seen[1].placed
    swapped = (
        first,
        attrs.evolve(second, image=third.image),
        attrs.evolve(third, image=second.image),
    )
    seen[1] = attrs.evolve(seen[1], placed=swapped)
    assert_caught(attrs.evolve(subject, media=seen))


def test_positions_are_transformers(subject: Subject) -> None:
    model = Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=TEXT, vision_config=VISION, **TOKENS)
    )
    for row, seen in zip(subject.rows, subject.media or [], strict=True):
        if seen is not None:
            ids = torch.from_numpy(row)[None]
            grids = torch.tensor(
                [[1, 2 * each.image.n_rows, 2 * each.image.n_columns] for each in seen.placed]
            )
            positions, offset = model.model.get_rope_index(ids, (ids == IMAGE).int(), grids)
            assert seen.positions.tolist() == positions[:, 0].tolist()
            assert seen.offset == int(offset)


CONFIG = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    **TOKENS,
    "text_config": TEXT,
    "vision_config": VISION,
}
FULL = {**VISION, "spatial_merge_size": 2, "temporal_patch_size": 2}


def refuses(
    message: str, text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None
) -> None:
    text, vision = {**TEXT, "rms_norm_eps": 1e-6, **(text or {})}, {**FULL, **(vision or {})}
    with pytest.raises(ValueError, match=message):
        read_model({**CONFIG, "text_config": text, "vision_config": vision})


def test_what_is_refused() -> None:
    rope = TEXT["rope_parameters"]
    refuses(
        "mrope_section .*; Qwen3-VL takes three whole numbers, with mrope_interleaved",
        {"rope_parameters": {"rope_theta": 1.0}},
    )
    refuses("with mrope_interleaved", {"rope_parameters": {**rope, "mrope_interleaved": False}})
    refuses(
        "vision_config.hidden_act = 'silu'; it must be one of gelu_pytorch_tanh",
        vision={"hidden_act": "silu"},
    )
    refuses(
        "the vision tower gives 40 numbers, the text model takes 48", vision={"out_hidden_size": 40}
    )
    refuses(
        "hidden_size = 36; it must be a multiple of 4 for each head", vision={"hidden_size": 36}
    )
    refuses(
        "rope type 'default' of the vision tower",
        vision={"rope_parameters": {"rope_type": "default"}},
    )


def test_a_checkpoint_of_transformers_4_is_read_too() -> None:
    text = {**TEXT, "rms_norm_eps": 1e-6, "rope_theta": 500.0}
    rope = dict(text.pop("rope_parameters"))
    del rope["rope_theta"]
    old, _ = read_model(
        {**CONFIG, "text_config": {**text, "rope_scaling": rope}, "vision_config": FULL}
    )
    new, _ = read_model(
        {**CONFIG, "text_config": {**TEXT, "rms_norm_eps": 1e-6}, "vision_config": FULL}
    )
    assert old == new


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_tower_in_half_types_differs_by_rounding(subject: Subject, dtype: torch.dtype) -> None:
    params = subject.params["vision"]
    narrow = torch.utils._pytree.tree_map(lambda tensor: tensor.to(dtype), params)
    seen = picture(np.random.default_rng(0), 3, 2)
    whole, half = (
        encode_image(subject.spec.vision, REFERENCE, each, seen, torch.device("cpu"))
        for each in (params, narrow)
    )
    assert half.dtype == dtype
    assert float((whole - half).abs().max() / whole.std()) < 0.2


def test_random_params_have_the_form_of_loaded_ones(subject: Subject) -> None:
    def form(params: Any) -> Any:
        return torch.utils._pytree.tree_map(lambda tensor: tensor.shape, params)

    assert form(random_params(subject.spec, torch.float32, torch.Generator())) == form(
        subject.params
    )
