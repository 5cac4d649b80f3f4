"""What a prompt shows beside its text: images, where they stand, and the positions that its tokens
have in the rope.

The law: an image is its content. Two with the same SHA-256 are one image; the prefix cache finds
what follows an image only behind the same one. Read next: text/images.py, which makes these of
files; steps/pack.py, which sends them on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import attrs
import numpy as np

from nva.state.columns import Column, Int, array_field


@attrs.frozen(kw_only=True, eq=False)
class Image:
    """A picture, cut into patches for a vision tower that gives n_rows * n_columns features, one
    for each token."""

    patches: Column = array_field()  # [n_patches, patch size] float32, a feature's in a row
    n_rows: int
    n_columns: int
    digest: bytes  # SHA-256 of all that

    @property
    def n_tokens(self) -> int:
        return self.n_rows * self.n_columns


def image(patches: Column, n_rows: int, n_columns: int) -> Image:
    """An image of these patches."""
    shape = np.array([n_rows, n_columns], np.int64)
    digest = hashlib.sha256(shape.tobytes() + patches.tobytes()).digest()
    return Image(patches=patches, n_rows=n_rows, n_columns=n_columns, digest=digest)


@attrs.frozen(kw_only=True)
class Placed:
    """An image whose tokens are positions [start, end) of a prompt."""

    image: Image
    start: int

    @property
    def end(self) -> int:
        return self.start + self.image.n_tokens


@attrs.frozen(kw_only=True)
class Media:
    """The images of a prompt, in order, and where its tokens stand in time, height and width
    (M-RoPE).

    Beyond the prompt all three are the token's index plus `offset`: an image takes less room on
    the axes than it has tokens."""

    placed: tuple[Placed, ...]
    positions: Int = array_field()  # [3, n_prompt]
    offset: int


def media(placed: Sequence[Placed], n_prompt: int) -> Media:
    """The media of a prompt of n_prompt tokens.

    Positions are Qwen2-VL's (Wang et al. 2024, M-RoPE): text advances all three axes by one; the
    tokens of an image share one time and count its rows and columns from there; text goes on after
    the larger of both."""
    positions = np.empty((3, n_prompt), np.int32)
    index = 0  # [0, index) of the prompt has its positions
    at = 0  # position of the next token of text
    for each in placed:
        n_text = each.start - index
        positions[:, index : each.start] = np.arange(at, at + n_text)
        at += n_text
        row, column = np.divmod(np.arange(each.image.n_tokens), each.image.n_columns)
        positions[:, each.start : each.end] = at + np.stack([0 * row, row, column])
        at += max(each.image.n_rows, each.image.n_columns)
        index = each.end
    positions[:, index:] = np.arange(at, at + n_prompt - index)
    return Media(placed=tuple(placed), positions=positions, offset=at - index)


def positions_between(media: Media | None, start: int, end: int) -> Int:
    """Positions [3, end - start] in the rope of tokens [start, end) of a sequence, prompt and
    output."""
    indices = np.arange(start, end, dtype=np.int32)
    if media is None:
        return np.broadcast_to(indices, (3, len(indices)))
    inside = media.positions[:, start:end]
    beyond = indices[inside.shape[1] :] + np.int32(media.offset)
    return np.concatenate([inside, np.broadcast_to(beyond, (3, len(beyond)))], axis=1)


def content_between(media: Media | None, start: int, end: int) -> bytes:
    """What tells apart sequences that have the same tokens [start, end) but not the same images
    there: digests, and where in each image the first token is."""
    if media is None:
        return b""
    overlapping = [each for each in media.placed if each.start < end and start < each.end]
    content = [each.image.digest + np.int64(start - each.start).tobytes() for each in overlapping]
    return b"".join(content)
