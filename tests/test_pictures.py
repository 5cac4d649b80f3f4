"""Whatever a user gives as an image reaches the processor as a person would see it, or is refused
by name."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow
from PIL import ImageOps

from nva.text.pictures import picture

RAMP = np.tile(np.linspace(0, 255, 32).round().astype(np.uint8), (20, 1))
SLOPE = RAMP // 2 + np.linspace(0, 120, 20).astype(np.uint8)[:, None]  # no way to turn it is itself
COLORS = np.random.default_rng(0).integers(0, 256, (20, 32, 3), dtype=np.uint8)


def pixels(source: Any) -> np.ndarray:
    """What picture() makes of it: always 8-bit RGB."""
    seen = picture(source)
    assert seen.mode == "RGB"
    return np.asarray(seen).astype(int)


def ink(mode: str) -> Pillow.Image:
    """A black square on a ground that is transparent, and black where nobody looks."""
    image = Pillow.new("RGBA", (16, 16), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (4, 4, 12, 12))
    if mode == "PA":
        indexed = Pillow.new("PA", (16, 16), (0, 0))
        indexed.paste((0, 255), (4, 4, 12, 12))
        indexed.putpalette([0, 0, 0])
        return indexed
    if mode == "La":
        return image.convert("LA").convert("La")
    return image.convert(mode)


def palette(has_palette_alpha: bool) -> Pillow.Image:
    """The same by a palette: as an index that is transparent, or in the palette itself."""
    image = Pillow.new("P", (16, 16), 0)
    image.paste(1, (4, 4, 12, 12))
    if has_palette_alpha:
        image.putpalette([0, 0, 0, 0, 0, 0, 0, 255], "RGBA")
    else:
        image.putpalette([0, 0, 0, 0, 0, 0])
        image.info["transparency"] = 0
    return image


def gray_with_clear(dtype: Any) -> Pillow.Image:
    """The same in one channel, one gray of which is transparent."""
    values = np.full((16, 16), 7, dtype)
    values[4:12, 4:12] = 0
    image = Pillow.fromarray(values)
    image.info["transparency"] = 7
    return image


SEE_THROUGH = {mode: ink(mode) for mode in ("RGBA", "RGBa", "LA", "La", "PA")}
SEE_THROUGH |= {"P": palette(False), "P, alpha in the palette": palette(True)}
SEE_THROUGH |= {"L": gray_with_clear(np.uint8), "I;16": gray_with_clear(np.uint16)}


@pytest.mark.parametrize("image", SEE_THROUGH.values(), ids=SEE_THROUGH)
def test_what_is_transparent_is_white(image: Pillow.Image) -> None:
    seen = pixels(image)
    assert (seen[0, 0] == 255).all()
    assert (seen[8, 8] == 0).all()


@pytest.mark.parametrize("suffix", ["png", "webp", "gif", "tiff"])
def test_a_transparent_file_is_white(tmp_path: Path, suffix: str) -> None:
    SEE_THROUGH["RGBA"].save(tmp_path / f"ink.{suffix}", lossless=True)
    seen = pixels(tmp_path / f"ink.{suffix}")
    assert (seen[0, 0] == 255).all()
    assert (seen[8, 8] == 0).all()


def test_half_transparent_ink_is_gray() -> None:
    assert (abs(pixels(Pillow.new("RGBA", (2, 2), (0, 0, 0, 128))) - 127) <= 1).all()
    assert (abs(pixels(Pillow.new("LA", (2, 2), (255, 128))) - 255) <= 1).all()


def shades(mode: str) -> Pillow.Image:
    """The ramp in a mode of more than 8 bits."""
    wide = RAMP.astype(np.uint16) * 257
    if mode == "I;16B":
        return Pillow.frombytes(mode, (32, 20), wide.astype(">u2").tobytes())
    if mode == "F":
        return Pillow.fromarray(wide.astype(np.float32))
    if mode == "F of 255":
        return Pillow.fromarray(RAMP.astype(np.float32))
    if mode == "F of 1":
        return Pillow.fromarray(RAMP.astype(np.float32) / 255)
    if mode == "I":
        return Pillow.fromarray(wide.astype(np.int32))
    if mode == "I of 255":
        return Pillow.fromarray(RAMP.astype(np.int32))
    return Pillow.frombytes(mode, (32, 20), wide.tobytes())


DEEP = ["I;16", "I;16L", "I;16B", "I;16N", "I", "I of 255", "F", "F of 255", "F of 1"]


@pytest.mark.parametrize("mode", DEEP)
def test_gray_of_more_bits_keeps_its_shades(mode: str) -> None:
    assert (pixels(shades(mode)) == RAMP[..., None]).all()


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_gray_of_16_bits_in_a_file(tmp_path: Path, suffix: str) -> None:
    shades("I;16").save(tmp_path / f"ramp.{suffix}")
    assert (pixels(tmp_path / f"ramp.{suffix}") == RAMP[..., None]).all()


@pytest.mark.parametrize("values", [[-1, 5], [0, 70000], [np.nan, 1], [np.inf, 1]])
def test_gray_without_a_known_white_is_refused(values: list[float]) -> None:
    image = Pillow.fromarray(np.array([values], np.float32))
    with pytest.raises(ValueError, match="its mode is F, its values go from .*scale them"):
        picture(image)


@pytest.mark.parametrize("mode", ["RGB", "RGBX", "CMYK", "YCbCr", "HSV", "LAB", "P", "L", "1"])
def test_other_modes_keep_their_colors(mode: str) -> None:
    """Up to the rounding of the mode itself; a blue and a yellow are what they were."""
    image = Pillow.new("RGB", (8, 8), (0, 0, 255))
    image.paste((255, 255, 0), (0, 0, 8, 4))
    if mode == "LAB":
        from PIL import ImageCms

        srgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
        turned = ImageCms.profileToProfile(image, srgb, lab, outputMode="LAB")
        assert turned is not None
    else:
        turned = image.convert(mode)
    expected = image.convert(mode).convert("RGB") if mode in ("L", "1") else image
    rounding = 24 if mode == "LAB" else 8
    assert (abs(pixels(turned) - np.asarray(expected).astype(int)) <= rounding).all()


def test_every_mode_of_pillow_is_a_picture_or_refused() -> None:
    for mode in Pillow.MODES + ["RGBX", "RGBa", "La", "PA", "LAB", "I;16", "I;16B", "I;16L"]:
        assert pixels(Pillow.new(mode, (3, 2))).shape == (2, 3, 3)


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tiff"])
def test_a_turned_picture_is_set_upright(tmp_path: Path, suffix: str, orientation: int) -> None:
    image = Pillow.fromarray(SLOPE)
    image.getexif()[0x0112] = orientation
    path = tmp_path / f"turned.{suffix}"
    image.save(path, exif=image.getexif(), **({"lossless": True} if suffix == "webp" else {}))
    expected = ImageOps.exif_transpose(image).convert("RGB")
    assert picture(path).size == expected.size == ((20, 32) if 5 <= orientation <= 8 else (32, 20))
    assert (abs(pixels(path) - np.asarray(expected).astype(int)) <= 12).all()
    assert (pixels(image) == np.asarray(expected)).all()


@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b"x", b""])
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_exif_that_cant_be_read_turns_nothing(tmp_path: Path, suffix: str, exif: bytes) -> None:
    image = Pillow.fromarray(COLORS)
    image.info["exif"] = exif
    assert (pixels(image) == COLORS).all()
    image.save(tmp_path / f"image.{suffix}", exif=exif)
    assert pixels(tmp_path / f"image.{suffix}").shape == COLORS.shape


def test_another_malformed_tag_hides_no_orientation() -> None:
    """Pillow's own function fails when it writes the rest back."""
    image = Pillow.fromarray(COLORS)
    exif = Pillow.Exif()
    exif[0x0112] = 6
    image.info["exif"] = exif.tobytes()
    image.info["xmp"] = 7
    assert picture(image).size == (20, 32)


@pytest.mark.parametrize("suffix", ["gif", "png", "webp", "tiff", "mpo"])
def test_of_several_frames_the_first_is_seen(tmp_path: Path, suffix: str) -> None:
    frames = [Pillow.new("RGB", (8, 8), color) for color in ("red", "blue", "green")]
    path = tmp_path / f"frames.{suffix}"
    frames[0].save(path, save_all=True, append_images=frames[1:])
    assert (abs(pixels(path)[4, 4] - [255, 0, 0]) <= 8).all()
    with Pillow.open(path) as opened:
        opened.seek(1)
        assert (abs(pixels(opened)[4, 4] - [0, 0, 255]) <= 8).all()  # the one that was chosen


def test_a_picture_given_stays_as_it_is_and_open() -> None:
    given = Pillow.fromarray(COLORS)
    before = given.copy()
    picture(given)
    assert given == before
    assert given.getpixel((0, 0)) == tuple(COLORS[0, 0])


def test_a_file_is_closed_again(tmp_path: Path) -> None:
    frames = [Pillow.new("RGB", (8, 8), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "frames.gif", save_all=True, append_images=frames[1:])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a ResourceWarning, if it were left to the collector
        picture(tmp_path / "frames.gif")


def damaged(path: Path) -> Path:
    """A file that stops in the middle."""
    Pillow.fromarray(COLORS).save(path)
    path.write_bytes(path.read_bytes()[:-200])
    return path


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tiff", "bmp"])
def test_a_truncated_file_is_refused(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(ValueError):
        picture(damaged(tmp_path / f"image.{suffix}"))


def test_a_picture_too_large_to_open_is_refused(tmp_path: Path, monkeypatch) -> None:
    Pillow.new("1", (100, 100)).save(tmp_path / "large.png")
    monkeypatch.setattr(Pillow, "MAX_IMAGE_PIXELS", 4000)
    with pytest.raises(ValueError, match="decompression bomb"):
        picture(tmp_path / "large.png")
    monkeypatch.setattr(Pillow, "MAX_IMAGE_PIXELS", 8000)  # only a warning of Pillow's
    assert picture(tmp_path / "large.png").size == (100, 100)


def closed() -> Pillow.Image:
    file = io.BytesIO()
    Pillow.fromarray(COLORS).save(file, "png")
    image = Pillow.open(file)
    image.close()
    return image


REFUSED = {
    "a URL": ("https://example.org/a.png", "it is a URL; give the path"),
    "data": ("data:image/png;base64,AAAA", "it is a URL; give the path"),
    "bytes": (b"png", "it is bytes; give the path"),
    "an array": (COLORS, "it is an array; give the path"),
    "a number": (7, "give the path of a file, or a PIL image"),
    "nothing": (None, "give the path of a file, or a PIL image"),
    "no file": ("nowhere.png", "No such file"),
    "a folder": (Path("/"), "Is a directory"),
    "no image": (__file__, "cannot identify image file"),
    "a null byte": ("a\0b", "null"),
    "no width": (Pillow.new("RGB", (0, 5)), "it is 0 wide and 5 high"),
    "no height": (Pillow.new("I", (5, 0)), "it is 5 wide and 0 high"),
    "closed": (closed(), "closed"),
}


@pytest.mark.parametrize(("source", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_picture_is_refused(source: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        picture(source)
