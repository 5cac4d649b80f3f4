"""Images of a prompt: found in its messages, cut into patches by the checkpoint's own processor,
put among its tokens.

The law: the processor decides (size, limits of pixels, normalization); nva only counts tokens after
it. The tokenizer writes one token for an image, which becomes as many as the image has features.
Read next: pictures.py for files and pixels; state/media.py for what comes out; models/vision.py,
which looks at it."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from nva.models.spec import VisionSpec
from nva.state.checks import is_list
from nva.state.media import Image, Media, Placed, image, media
from nva.text.chat import Tokenizer
from nva.text.library import IMPORTS
from nva.text.pictures import picture
from nva.text.prompts import Prompt, encode

CONFIG = "preprocessor_config.json"
"""The image processor's settings, alone in a file."""
ALL_CONFIG = "processor_config.json"
"""The settings of all processors, in newer checkpoints: those of images are under one key."""


@attrs.frozen(kw_only=True)
class ImageReader:
    """What reads images for a checkpoint. The processor is loaded with the first one."""

    folder: Path
    spec: VisionSpec


def encode_prompt(
    tokenizer: Tokenizer | None, reader: ImageReader | None, prompt: Prompt
) -> tuple[list[int], Media | None]:
    """Token ids of a prompt, and its images. Raises ValueError as encode() does, and for images
    that can't be read."""
    sources = image_sources(prompt)
    if sources and reader is None:
        raise ValueError("the prompt has an image, but this model reads text only")
    ids = encode(tokenizer, prompt)
    if reader is None:
        return ids, None
    images = [read_image(reader, each) for each in sources]
    return place_images(ids, images, reader)


def image_sources(prompt: Prompt) -> list[Any]:
    """What the messages of a prompt give as images, in order; encode() checks their form."""
    messages = prompt.get("messages") if isinstance(prompt, Mapping) else None
    contents = [
        message.get("content") for message in _listed(messages) if isinstance(message, Mapping)
    ]
    parts = [part for content in contents for part in _listed(content) if isinstance(part, Mapping)]
    return [part.get("image") for part in parts if part.get("type") == "image"]


def _listed(value: object) -> Sequence[Any]:
    return value if is_list(value) else ()


def place_images(
    ids: Sequence[int], images: Sequence[Image], reader: ImageReader
) -> tuple[list[int], Media | None]:
    """The tokens of a prompt, with each image's one token repeated for all its features."""
    token = reader.spec.image_token
    if ids.count(token) != len(images):
        raise ValueError(
            f"the prompt has {ids.count(token)} tokens {token}, which stand for images, and "
            f"{len(images)} images; "
            'give images as {"type": "image", "image": ...} in messages, and don\'t write their '
            "token"
        )
    placed: list[Placed] = []
    expanded: list[int] = []
    for each in ids:
        if each == token:
            placed.append(Placed(image=images[len(placed)], start=len(expanded)))
        expanded += [each] * (placed[-1].image.n_tokens if each == token else 1)
    return expanded, media(placed, len(expanded)) if placed else None


def largest_image(reader: ImageReader, max_tokens: int) -> Image:
    """An empty image of the size that its processor scales larger ones down to, or of max_tokens if
    that is less."""
    spec = reader.spec
    n_pixels = _max_pixels(processor_config(reader.folder) or {})
    if n_pixels is not None:
        pixels_per_token = spec.merge_size**2 * math.prod(spec.patch_shape[2:])
        max_tokens = min(max_tokens, n_pixels // pixels_per_token)
    n_rows = max(1, math.isqrt(max_tokens))
    n_columns = max(1, max_tokens // n_rows)
    patches = np.zeros(
        (n_rows * n_columns * spec.merge_size**2, math.prod(spec.patch_shape)), np.float32
    )
    return Image(patches=patches, n_rows=n_rows, n_columns=n_columns, digest=b"")


def _max_pixels(config: Mapping[str, Any]) -> int | None:
    """How many pixels a processor leaves of a whole image, under either of the names for it."""
    size = config.get("size")
    edges = size if isinstance(size, Mapping) else {}
    return config.get("max_pixels") or edges.get("longest_edge") or edges.get("max_pixels")


def read_image(reader: ImageReader, source: Any) -> Image:
    """An image from a file's path, or a PIL image. Raises ValueError if there is none, or it can't
    be understood."""
    process, spec = _processor(reader.folder), reader.spec
    try:
        found = process(images=[picture(source)], return_tensors="np")
    except ValueError as error:
        raise ValueError(f"the image {source!r:.80} can't be used: {error}") from error
    patches = found["pixel_values"]
    _, n_rows, n_columns = found["image_grid_thw"][0].tolist()
    sizes = (patches.shape[1], process.merge_size)
    wanted = (math.prod(spec.patch_shape), spec.merge_size)
    if sizes != wanted:
        raise ValueError(
            f"the image processor of {reader.folder} makes patches of {sizes}, config.json asks "
            f"for {wanted}; download both again"
        )
    return image(
        patches.astype(np.float32), n_rows // spec.merge_size, n_columns // spec.merge_size
    )


def processor_config(folder: Path) -> dict[str, Any] | None:
    """The settings of a checkpoint's image processor, from whichever file has them; None if none
    does. Where two files do, the newer form counts, as it does for transformers.

    Raises ValueError for a file that can't be read."""
    for name in (ALL_CONFIG, CONFIG):
        content = _read_json(folder / name)
        nested = content.get("image_processor")
        if isinstance(nested, Mapping):
            return dict(nested)
        if name == CONFIG and content:
            return content
    return None


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; an empty one if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} can't be read: {error}; download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object; download it again")
    return content


@functools.lru_cache(maxsize=8)
def _processor(folder: Path) -> Any:
    """The checkpoint's image processor, in the form that needs no torchvision. All of Qwen's are
    one, which has had several names."""
    config = processor_config(folder)
    if config is None:
        raise ValueError(
            f"{folder} has neither {CONFIG} nor {ALL_CONFIG} with an image_processor, which say "
            "how images are prepared; download them"
        )
    name = config.get("image_processor_type") or config.get("feature_extractor_type")
    if name is not None and not re.match(r"Qwen\d(_\d)?_?VL", str(name)):
        raise ValueError(
            f"{folder} asks for the image processor {name!r:.80}, which nva doesn't know; it knows "
            "Qwen2VLImageProcessor"
        )
    try:
        with IMPORTS:
            from transformers import Qwen2VLImageProcessorPil

            return Qwen2VLImageProcessorPil.from_dict(config)
    except (ValueError, TypeError, KeyError) as error:  # what odd settings lead to
        raise ValueError(f"no image processor can be made from {folder}: {error!s:.200}") from error
