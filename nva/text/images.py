"""Images of a prompt: found in its messages, cut into patches by the checkpoint's own processor,
put among its tokens.

The law: the processor decides (size, limits of pixels, normalization); nva only counts tokens after
it. The tokenizer writes one token for an image, which becomes as many as the image has features.
Read next: state/media.py for what comes out; models/vision.py, which looks at it."""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from nva.models.spec import VisionSpec
from nva.state.media import Image, Media, Placed, image, media
from nva.text.chat import Tokenizer
from nva.text.prompts import Prompt, encode

CONFIG = "preprocessor_config.json"


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
    return (
        (ids, None)
        if reader is None
        else place_images(ids, [read_image(reader, each) for each in sources], reader)
    )


def image_sources(prompt: Prompt) -> list[Any]:
    """What the messages of a prompt give as images, in order; encode() checks their form."""
    messages = prompt.get("messages") if isinstance(prompt, Mapping) else None
    contents = [
        message.get("content") for message in _listed(messages) if isinstance(message, Mapping)
    ]
    parts = [part for content in contents for part in _listed(content) if isinstance(part, Mapping)]
    return [part.get("image") for part in parts if part.get("type") == "image"]


def _listed(value: object) -> Sequence[Any]:
    return value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else ()


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
    spec, path = reader.spec, reader.folder / CONFIG
    config = json.loads(path.read_text()) if path.is_file() else {}
    n_pixels = config.get("max_pixels") or config.get("size", {}).get(
        "longest_edge"
    )  # of the whole image, both times
    if n_pixels is not None:
        max_tokens = min(
            max_tokens, n_pixels // (spec.merge_size**2 * math.prod(spec.patch_shape[2:]))
        )
    n_rows = max(1, math.isqrt(max_tokens))
    n_columns = max(1, max_tokens // n_rows)
    patches = np.zeros(
        (n_rows * n_columns * spec.merge_size**2, math.prod(spec.patch_shape)), np.float32
    )
    return Image(patches=patches, n_rows=n_rows, n_columns=n_columns, digest=b"")


def read_image(reader: ImageReader, source: Any) -> Image:
    """An image from a file's path, or a PIL image. Raises ValueError if there is none, or it can't
    be understood."""
    process, spec = _processor(reader.folder), reader.spec
    try:
        found = process(images=[_picture(source)], return_tensors="np")
    except ValueError as error:
        raise ValueError(f"the image {source!r:.80} can't be used: {error}") from error
    patches, (_, n_rows, n_columns) = found["pixel_values"], found["image_grid_thw"][0].tolist()
    sizes, wanted = (
        (patches.shape[1], process.merge_size),
        (math.prod(spec.patch_shape), spec.merge_size),
    )
    if sizes != wanted:
        raise ValueError(
            f"{CONFIG} makes patches of {sizes}, config.json asks for {wanted}; download both again"
        )
    return image(
        patches.astype(np.float32), n_rows // spec.merge_size, n_columns // spec.merge_size
    )


def _picture(source: Any) -> Any:
    """An upright RGB image of PIL's."""
    try:
        from PIL import Image as Pillow
        from PIL import ImageOps
    except ImportError as error:
        raise ValueError("images need Pillow; pip install 'nva[vision]'") from error
    if not isinstance(source, (str, Path, Pillow.Image)):
        raise ValueError("give the path of a file, or a PIL image")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", Pillow.DecompressionBombWarning
            )  # what is large is scaled down
            opened = source if isinstance(source, Pillow.Image) else Pillow.open(source)
            return ImageOps.exif_transpose(opened).convert("RGB")
    except (OSError, Pillow.DecompressionBombError) as error:
        raise ValueError(str(error)) from error


@functools.lru_cache(maxsize=8)
def _processor(folder: Path) -> Any:
    """The checkpoint's image processor, in the form that needs no torchvision."""
    if not (folder / CONFIG).is_file():
        raise ValueError(
            f"{folder} has no {CONFIG}, which says how images are prepared; download it"
        )
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(
        folder, backend="pil", local_files_only=True, trust_remote_code=False
    )
