"""Prompts with images through the whole engine: transformers' tokens, whatever chunks, blocks and
neighbours there are; an image is found again by its content; what can't be read is refused."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen3VLForConditionalGeneration,
)

import nva
from nva.models.registry import read_model
from nva.state.engine import check
from nva.state.media import positions_between
from nva.steps.pack import pack
from nva.steps.schedule import schedule
from nva.text.images import ImageReader, encode_prompt, image_sources, largest_image, read_image
from tests.models.test_qwen3_vl import IMAGE, TEXT, build

TEMPLATE = """{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}\
{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"""
SPECIAL = {90: "<|image_pad|>", 92: "<|vision_start|>", 93: "<|vision_end|>"}
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 16 * 16, "longest_edge": 32 * 32},
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "block_size": 4,
    "max_rows": 6,
    "max_model_len": 80,
}
GREEDY = nva.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return servable(tmp_path_factory.mktemp("qwen3_vl"))


def servable(path: Path, **text_config: Any) -> Path:
    """A random Qwen3-VL in the folder, with a tokenizer of 97 characters, a chat template and an
    image processor."""
    build(path, **text_config)
    vocab = {SPECIAL.get(i, chr(0x4E00 + i)): i for i in range(TEXT["vocab_size"])}
    characters = Tokenizer(models.WordLevel(vocab, unk_token=chr(0x4E00)))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, additional_special_tokens=list(SPECIAL.values())
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return path


def picture(seed: int, height: int = 20, width: int = 28) -> Pillow.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Pillow.fromarray(pixels)


def text(seed: int, n: int) -> str:
    return "".join(chr(0x4E00 + token) for token in np.random.default_rng(seed).integers(1, 89, n))


def prompt(*parts: Any) -> dict[str, Any]:
    """A conversation of one message: strings are text, all else images."""
    kinds = ["text" if isinstance(part, str) else "image" for part in parts]
    content = [{"type": kind, kind: part} for kind, part in zip(kinds, parts, strict=True)]
    return {"messages": [{"role": "user", "content": content}]}


PROMPTS = [
    prompt(text(0, 6), picture(0), text(1, 3)),
    prompt(text(0, 6), picture(1), text(1, 3)),  # the same text, another image
    prompt(picture(0, 30, 12), text(2, 2), picture(1, 16, 40), picture(2, 9, 9), text(3, 5)),
    prompt(text(4, 11)),
    prompt(text(0, 6), picture(0), text(5, 4)),  # begins like the first
    text(6, 2),
]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """transformers' greedy answers."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    process = Qwen2VLImageProcessorPil.from_pretrained(folder)
    answers = []
    for given in PROMPTS:
        images = image_sources(given)
        written = (
            tokenizer.apply_chat_template(given["messages"], tokenize=False)
            if isinstance(given, dict)
            else given
        )
        seen = process(images=images, return_tensors="pt") if images else {}
        for n in seen["image_grid_thw"].prod(-1).tolist() if images else ():
            written = written.replace("<|image_pad|>", "@" * (n // 4), 1)
        ids = tokenizer(written.replace("@", "<|image_pad|>"), return_tensors="pt").input_ids
        marks = {"mm_token_type_ids": (ids == IMAGE).int()} if images else {}
        out = model.generate(
            ids, **seen, **marks, max_new_tokens=8, do_sample=False, pad_token_id=0
        )
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers


LIMITS = {
    "at ease": {"n_blocks": 200},
    "chunks of 1": {"n_blocks": 200, "max_batched_tokens": 1},
    "chunks of 7": {"n_blocks": 200, "max_batched_tokens": 7},
    "few blocks": {"n_blocks": 14},
    "few blocks, chunks of 5": {"n_blocks": 14, "max_batched_tokens": 5},
    "no prefix cache": {"n_blocks": 200, "prefix_caching": False},
}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_answers_are_transformers(
    folder: Path, expected: list[list[int]], limits: dict[str, Any]
) -> None:
    seen: Counter[str] = Counter()

    def counted(state):
        state, plan = schedule(state)
        seen.update(preempted=len(plan.preempted), hits=plan.n_hit)
        return state, plan

    def watched(state, plan):
        batch, draw = pack(state, plan)
        seen.update(cut=sum(span.count < span.image.n_tokens for span in batch.images))
        return batch, draw

    engine = nva.load(folder, **SIZES, **limits)
    engine.steps = attrs.evolve(engine.steps, schedule=counted, pack=watched)
    answers = nva.generate(engine, PROMPTS, GREEDY)
    assert [list(answer.token_ids) for answer in answers] == expected
    check(engine.state)
    assert (seen["hits"] > 0) == limits.get("prefix_caching", True)
    assert (seen["preempted"] > 0) == (limits["n_blocks"] == 14)
    if "max_batched_tokens" in limits:
        assert seen["cut"] > 0


def test_the_same_image_is_found_again_and_another_is_not(folder: Path, tmp_path: Path) -> None:
    """As a picture or in a file. Before the image stands one block of text, which all prompts
    share."""
    picture(0).save(tmp_path / "same.png")
    engine = nva.load(folder, **SIZES, n_blocks=200)
    cached = []
    for shown in (picture(0), picture(1), tmp_path / "same.png", picture(1)):
        (answer,) = nva.generate(engine, prompt(text(0, 6), shown, text(1, 3)), GREEDY)
        cached.append(answer.n_cached_tokens)
    whole = (answer.n_prompt_tokens - 1) // 4 * 4
    assert cached == [0, 4, whole, whole]
    assert whole > 4


@pytest.mark.parametrize("fault", ["content_between", "positions_between"])
def test_keys_without_content_and_positions_without_offset_are_caught(
    folder: Path, expected: list[list[int]], fault: str, monkeypatch
) -> None:
    """One finds another image's blocks, the other decodes as if an image took as much room as it
    has tokens."""
    faults = {
        "content_between": lambda media, start, end: b"",
        "positions_between": lambda media, start, end: positions_between(
            media and attrs.evolve(media, offset=0, positions=media.positions.copy()), start, end
        ),
    }
    module = "nva.steps.prefix" if fault == "content_between" else "nva.steps.pack"
    sound = nva.generate(nva.load(folder, **SIZES, n_blocks=200), PROMPTS, GREEDY)
    monkeypatch.setattr(sys.modules[module], fault, faults[fault])
    found = nva.generate(nva.load(folder, **SIZES, n_blocks=200), PROMPTS, GREEDY)
    if fault == "content_between":  # blocks, which may by chance lead to the same answers
        cached = [[answer.n_cached_tokens for answer in each] for each in (sound, found)]
        assert sum(cached[1]) > sum(cached[0])
    else:
        assert [list(answer.token_ids) for answer in found] != expected


def test_an_image_cut_by_chunks_is_computed_once(folder: Path, monkeypatch) -> None:
    forward = sys.modules["nva.forward"]
    calls, encode = [], forward.encode_image
    monkeypatch.setattr(
        forward, "encode_image", lambda *args, **named: calls.append(args) or encode(*args, **named)
    )
    engine = nva.load(folder, **SIZES, n_blocks=200, max_batched_tokens=5)
    nva.generate(engine, [prompt(text(0, 6), picture(0), text(1, 3))], GREEDY)
    assert len(calls) == 1
    nva.generate(engine, [prompt(picture(1), picture(2))], GREEDY)
    assert len(calls) == 3


def test_samples_of_one_prompt_share_its_image(folder: Path) -> None:
    params = nva.SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=6, ignore_eos=True)
    engine = nva.load(folder, **SIZES, n_blocks=200)
    (together,) = nva.generate(engine, [PROMPTS[0]], params)
    pressed = nva.load(folder, **SIZES, n_blocks=22, max_batched_tokens=3)
    (again,) = nva.generate(pressed, [PROMPTS[0]], params)
    assert [sample.token_ids for sample in together.samples] == [
        sample.token_ids for sample in again.samples
    ]
    assert len({sample.token_ids for sample in together.samples}) > 1


def test_a_huge_image_is_scaled_and_a_turned_one_set_upright(folder: Path) -> None:
    engine = nva.load(folder, **SIZES, n_blocks=200)
    (answer,) = nva.generate(engine, [prompt(Pillow.new("RGB", (9000, 6000)))], GREEDY)
    assert answer.n_prompt_tokens <= 32 * 32 // 64 + 2
    upright, turned = picture(0), picture(0).rotate(90, expand=True)
    turned.getexif()[0x0112] = 6  # to be turned by 90 degrees
    asked = [prompt(upright), prompt(turned), prompt(upright.convert("RGBA"))]
    first, second, third = nva.generate(engine, asked, GREEDY)
    assert first.token_ids == second.token_ids == third.token_ids


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (prompt(Path("nowhere.png")), "the image .*nowhere.png.* can't be used: .*No such file"),
        ({"messages": [{"role": "user", "content": 3}]}, "give a str or a list of parts"),
        ({"messages": 3}, '"messages" must be a list'),
        (prompt(7), "the image 7 can't be used: give the path of a file, or a PIL image"),
        (prompt(b"png"), "give the path of a file, or a PIL image"),
        (prompt(picture(0, 1, 300)), "can't be used: absolute aspect ratio"),
        ("<|image_pad|>", "has 1 tokens 90, which stand for images, and 0 images"),
        (
            {**prompt("<|image_pad|>", picture(0)), "parse_special_tokens": True},
            "has 2 tokens 90, which stand for images, and 1 images",
        ),
        ([3, IMAGE], "has 1 tokens 90, which stand for images, and 0 images"),
        (
            prompt(*[picture(i) for i in range(12)]),
            "the prompt has .* tokens; at most 79 leave room",
        ),
    ],
)
def test_what_is_refused(folder: Path, given: Any, message: str) -> None:
    engine = nva.load(folder, **SIZES, n_blocks=200)
    with pytest.raises(ValueError, match=message):
        nva.generate(engine, [given], GREEDY)


def test_the_token_of_an_image_written_in_a_message_is_text(folder: Path) -> None:
    engine = nva.load(folder, **SIZES, n_blocks=200)
    (answer,) = nva.generate(engine, prompt("<|image_pad|>", picture(0)), GREEDY)
    n_features = read_image(reader_of(folder), picture(0)).n_tokens
    assert answer.prompt_token_ids.count(IMAGE) == n_features


def test_a_model_that_reads_text_only_refuses_images() -> None:
    with pytest.raises(ValueError, match="the prompt has an image, but this model reads text only"):
        encode_prompt(None, None, prompt(picture(0)))
    assert encode_prompt(None, None, [1, 2]) == ([1, 2], None)


def copied(folder: Path, to: Path, **files: Any) -> Path:
    """The checkpoint with these processor files, by the beginnings of their names, and no others."""
    for path in folder.iterdir():
        if "processor" not in path.name:
            (to / path.name).write_bytes(path.read_bytes())
    for name, content in files.items():
        (to / f"{name}_config.json").write_text(json.dumps(content))
    return to


def reader_of(folder: Path) -> ImageReader:
    spec = read_model(json.loads((folder / "config.json").read_text()))[0].vision
    assert spec is not None
    return ImageReader(folder=folder, spec=spec)


def test_a_processor_unlike_the_model_is_refused(folder: Path, tmp_path: Path) -> None:
    copied(folder, tmp_path, preprocessor={**PREPROCESSOR, "patch_size": 8})
    engine = nva.load(tmp_path, **SIZES, n_blocks=200)
    with pytest.raises(
        ValueError, match=r"makes patches of \(384, 2\), config.json asks for \(96, 2\)"
    ):
        nva.generate(engine, [prompt(picture(0))], GREEDY)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"video_preprocessor": PREPROCESSOR},  # for videos alone
        {"processor": {"processor_class": "Qwen3VLProcessor"}},
        {"processor": {"video_processor": PREPROCESSOR}},
    ],
)
def test_a_checkpoint_without_a_processor_reads_text(
    folder: Path, tmp_path: Path, files: dict[str, Any]
) -> None:
    engine = nva.load(copied(folder, tmp_path, **files), **SIZES, n_blocks=200)
    assert len(nva.generate(engine, [text(0, 3)], GREEDY)) == 1
    with pytest.raises(ValueError, match=r"has neither preprocessor_config\.json nor.*download"):
        nva.generate(engine, [prompt(picture(0))], GREEDY)


SMALLER = {**PREPROCESSOR, "size": {"shortest_edge": 64, "longest_edge": 256}}
BY_PIXELS = {name: value for name, value in PREPROCESSOR.items() if name != "size"}
BY_PIXELS |= {"min_pixels": 16 * 16, "max_pixels": 32 * 32}
PROCESSOR_FILES = {
    "transformers 4": {"preprocessor": PREPROCESSOR},
    "transformers 5": {"processor": {"image_processor": PREPROCESSOR}},
    "with one for videos": {
        "processor": {"image_processor": PREPROCESSOR, "video_processor": SMALLER},
        "video_preprocessor": SMALLER,
    },
    "both, the newer counts": {
        "processor": {"image_processor": PREPROCESSOR},
        "preprocessor": SMALLER,
    },
    "both, the newer says nothing": {
        "processor": {"processor_class": "Qwen3VLProcessor"},
        "preprocessor": PREPROCESSOR,
    },
    "nested in the older": {"preprocessor": {"image_processor": PREPROCESSOR}},
    "limits by their older names": {"preprocessor": BY_PIXELS},
    "limits by their older names, nested": {"processor": {"image_processor": BY_PIXELS}},
}
PROCESSOR_FILES |= {
    f"named {name}": {"preprocessor": {**PREPROCESSOR, "image_processor_type": name}}
    for name in (
        "Qwen2VLImageProcessor",
        "Qwen2VLImageProcessorPil",
        "Qwen2_5_VLImageProcessor",
        "Qwen3VLImageProcessorFast",
        None,
    )
}
PROCESSOR_FILES["named a feature extractor"] = {
    "preprocessor": {
        **{name: PREPROCESSOR[name] for name in PREPROCESSOR if name != "image_processor_type"},
        "feature_extractor_type": "Qwen2VLFeatureExtractor",
    }
}


@pytest.mark.parametrize("files", PROCESSOR_FILES.values(), ids=PROCESSOR_FILES)
def test_a_processor_is_found_in_whichever_file_has_it(
    folder: Path, tmp_path: Path, files: dict[str, Any]
) -> None:
    """By what reads images, and by what makes room for the largest."""
    reader = reader_of(copied(folder, tmp_path, **files))
    shown = picture(0, 300, 300)
    expected = read_image(reader_of(folder), shown)
    assert (read_image(reader, shown).patches == expected.patches).all()
    assert largest_image(reader, 1000).n_tokens == expected.n_tokens == 16


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "can't be read: .*download it again"), ("[]", "holds no JSON object")],
)
@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_a_broken_processor_file_is_refused(
    folder: Path, tmp_path: Path, name: str, content: str, message: str
) -> None:
    reader = reader_of(copied(folder, tmp_path))
    (tmp_path / name).write_text(content)
    for read in (lambda: read_image(reader, picture(0)), lambda: largest_image(reader, 9)):
        with pytest.raises(ValueError, match=f"{name} {message}"):
            read()


def test_a_processor_that_transformers_doesnt_know_is_refused(folder: Path, tmp_path: Path) -> None:
    config = {**PREPROCESSOR, "image_processor_type": "MyImageProcessor"}
    reader = reader_of(copied(folder, tmp_path, preprocessor=config))
    with pytest.raises(
        ValueError, match="asks for the image processor 'MyImageProcessor', which nva doesn't"
    ):
        read_image(reader, picture(0))


@pytest.mark.parametrize(
    "size", [(1, 1), (1, 2), (2, 1), (3, 3), (1, 3), (3, 1), (190, 1), (1, 199)]
)
def test_the_smallest_and_the_thinnest_pictures_are_seen(folder: Path, size: Any) -> None:
    """An array of 1 or 3 rows could be taken for one whose channels come first."""
    seen = read_image(reader_of(folder), Pillow.new("RGB", size, (255, 0, 51))).patches
    channels = seen.reshape(len(seen), 3, -1)
    for channel, value in enumerate((1.0, -1.0, -0.6)):
        assert np.allclose(channels[:, channel], value, atol=0.01)


def test_pictures_are_named_where_they_cant_be_used(folder: Path) -> None:
    engine = nva.load(folder, **SIZES, n_blocks=200)
    for wrong, message in ((Pillow.new("RGB", (0, 4)), "0 wide"), (Path("a.png"), "No such file")):
        with pytest.raises(ValueError, match=r"prompt 0: the image .* can't be used: .*" + message):
            nva.generate(engine, [prompt(wrong)], GREEDY)


def test_ink_on_a_transparent_ground_reaches_the_model(folder: Path) -> None:
    clear = Pillow.new("RGBA", (16, 16), (0, 0, 0, 0))
    clear.paste((0, 0, 0, 255), (4, 4, 12, 12))
    white = Pillow.new("RGB", (16, 16), "white")
    white.paste((0, 0, 0), (4, 4, 12, 12))
    reader = reader_of(folder)
    assert read_image(reader, clear).digest == read_image(reader, white).digest


@pytest.mark.parametrize(
    ("config", "max_tokens", "expected"),
    [
        (PREPROCESSOR, 80, (4, 4)),
        (PREPROCESSOR, 7, (2, 3)),
        ({"max_pixels": 40 * 24}, 80, (3, 5)),
        ({}, 50, (7, 7)),
        ({"max_pixels": 1}, 80, (1, 1)),
    ],
)
def test_the_largest_image(
    folder: Path, tmp_path: Path, config: dict[str, Any], max_tokens: int, expected: Any
) -> None:
    """What the processor makes of a huge picture; without a limit of its own, what a prompt may
    hold."""
    image = largest_image(reader_of(copied(folder, tmp_path, preprocessor=config)), max_tokens)
    assert (image.n_rows, image.n_columns) == expected
    assert image.patches.shape == (4 * image.n_tokens, 96)
    if config is PREPROCESSOR and max_tokens > 16:
        made = read_image(reader_of(folder), picture(0, 300, 300))
        assert made.patches.shape == image.patches.shape


def test_without_a_processor_a_prompt_bounds_the_largest_image(
    folder: Path, tmp_path: Path
) -> None:
    assert largest_image(reader_of(copied(folder, tmp_path)), 10).n_tokens == 9
