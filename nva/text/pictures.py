"""Whatever a user gives as an image, as the RGB picture that a person would see.

The law: the picture is what an image viewer shows on a white page, or it is refused: upright, with
white under what is transparent, with every shade that its mode has; of several frames the one that
it is opened at, the first of a file. Read next: images.py, which cuts it into patches."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ORIENTATION = 0x0112  # the EXIF tag
FORMS = "give the path of a file, or a PIL image"


def picture(source: Any) -> Any:
    """An upright RGB image of PIL's, from a path or a PIL image, which stays as it is.

    Raises ValueError for anything else, and for what Pillow can't read or has no pixels."""
    try:
        from PIL import Image as Pillow
    except ImportError as error:
        raise ValueError("images need Pillow; pip install 'nva[vision]'") from error
    _check_source(source, Pillow)
    try:
        with warnings.catch_warnings():
            # Pillow warns of EXIF that it can't read, and of what is large, which is scaled down;
            # what is too large for that is an error of its own.
            warnings.simplefilter("ignore", UserWarning)
            warnings.simplefilter("ignore", Pillow.DecompressionBombWarning)
            with _opened(source, Pillow) as image:
                return _seen(image, Pillow)
    except Exception as error:  # each format has a reader of its own, which may fail in any way
        raise ValueError(str(error) or type(error).__name__) from error


def _seen(image: Any, pillow: Any) -> Any:
    if 0 in image.size:
        raise ValueError(f"it is {image.width} wide and {image.height} high")
    image.load()  # TIFF turns itself upright here, and PNG may read its EXIF only now
    return _rgb(_upright(image, pillow), pillow)


def _check_source(source: Any, pillow: Any) -> None:
    if isinstance(source, str) and source.startswith(("http:", "https:", "data:", "file:")):
        raise ValueError(f"it is a URL; {FORMS}")
    if isinstance(source, (bytes, bytearray, memoryview)):
        raise ValueError(f"it is bytes; {FORMS}, such as PIL.Image.open(io.BytesIO(data))")
    if isinstance(source, np.ndarray):
        raise ValueError(f"it is an array; {FORMS}, such as PIL.Image.fromarray(array)")
    if not isinstance(source, (str, Path, pillow.Image)):
        raise ValueError(FORMS)


@contextmanager
def _opened(source: Any, pillow: Any) -> Iterator[Any]:
    """The image; one that is opened here is closed again."""
    if isinstance(source, pillow.Image):
        yield source
        return
    # By its path, Pillow would map an uncompressed TIFF into memory, one that is turned wrongly.
    with open(source, "rb") as file, pillow.open(file) as opened:
        yield opened


def _upright(image: Any, pillow: Any) -> Any:
    """The image, turned as its EXIF says; with EXIF that can't be read it stays as it is, since
    there is nothing else to go by."""
    turns = pillow.Transpose
    by_orientation = {
        2: turns.FLIP_LEFT_RIGHT,
        3: turns.ROTATE_180,
        4: turns.FLIP_TOP_BOTTOM,
        5: turns.TRANSPOSE,
        6: turns.ROTATE_270,
        7: turns.TRANSVERSE,
        8: turns.ROTATE_90,
    }
    try:
        orientation = image.getexif().get(ORIENTATION)
    except Exception:  # malformed EXIF fails in as many ways as there are to write it
        orientation = None
    turn = by_orientation.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def _rgb(image: Any, pillow: Any) -> Any:
    """Any mode as RGB."""
    if image.mode.startswith("I") or image.mode == "F":
        image = _shades(image, pillow)
    if image.has_transparency_data:
        image = _on_white(image, pillow)
    return image.convert("RGB")


def _shades(image: Any, pillow: Any) -> Any:
    """Gray of more than 8 bits as L, or as LA where one gray means transparent: scaled, as Pillow
    itself would clip it."""
    values = np.asarray(image)
    gray = pillow.fromarray(np.rint(values * (255 / _white(image.mode, values))).astype(np.uint8))
    clear = image.info.get("transparency")
    if clear is None:
        return gray
    opaque = pillow.fromarray(np.where(values == clear, 0, 255).astype(np.uint8))
    return pillow.merge("LA", (gray, opaque))


def _white(mode: str, values: np.ndarray[Any, Any]) -> int:
    """The value of white. Modes I and F don't say theirs: it is the least of the usual ones (1 for
    a float, 255, 65535) that no value exceeds."""
    if mode.startswith("I;16"):
        return 65535
    low, high = float(values.min()), float(values.max())
    usual = (1, 255, 65535) if mode == "F" else (255, 65535)
    if not 0 <= low <= high <= usual[-1]:  # NaN fails too
        raise ValueError(
            f"its mode is {mode}, its values go from {low:g} to {high:g}; scale them to 0 to 255 "
            "and convert it to mode L"
        )
    return next(white for white in usual if high <= white)


def _on_white(image: Any, pillow: Any) -> Any:
    """The image with white under it, as the tools of the models themselves put it."""
    if image.mode == "La":
        image = image.convert("LA")
    seen = image.convert("RGBA")
    white = pillow.new("RGBA", seen.size, "white")
    return pillow.alpha_composite(white, seen)
