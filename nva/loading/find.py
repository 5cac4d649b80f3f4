"""From a model's name to its folder: a local one, a hub id, or the demo model.

The law: only files that nva reads are asked of the hub, and what its cache holds already is enough
without a network. A name that can be no hub id is never sent there.
Read next: load.py, which opens the folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from nva.host.cache_folder import cache_folder
from nva.host.messages import say

DEMO_MODEL = "SmolLM2-135M-Instruct"
GIVE = "give a checkpoint's folder or a hub id such as Qwen/Qwen3-0.6B"

CONFIGS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "processor_config.json",
    "preprocessor_config.json",
    "model.safetensors.index.json",
)
"""What is read of a repository beside its weights. Names, not patterns: in the hub's patterns, *
would also match what lies in other folders."""
OLD_TOKENIZERS = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
"""What a tokenizer is made of where there is no tokenizer.json."""
LARGE = ("tokenizer.json", "vocab.json")
"""Files of megabytes, which are read once only, by the tokenizers library."""
OTHER_FORMATS = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".json", ".zip")
"""How names of files end that are no folder of a checkpoint."""


def find_model(model: str | os.PathLike[str] | None) -> Path:
    """The model's folder, downloaded from the hub if need be. None is the NVA_MODEL environment
    variable, else the demo model. Raises ValueError if the model can't be had."""
    if model is not None:
        return _find(model)
    named = os.environ.get("NVA_MODEL")
    if not named:
        return _demo()
    try:
        return _find(named)
    except ValueError as error:
        raise ValueError(f"NVA_MODEL is {named!r}: {error}") from error


def _find(model: str | os.PathLike[str]) -> Path:
    if not isinstance(model, (str, os.PathLike)) or not os.fspath(model):
        raise ValueError(f"model is {model!r}; {GIVE}")
    name = os.fsdecode(model)
    return _local(name) or _download(name)


def demo_folder() -> Path:
    """Where scripts/demo_model.py puts the demo model."""
    return cache_folder() / DEMO_MODEL


def name_of(folder: Path) -> str:
    """What a model is called: its hub id where the folder lies in the hub's cache, whose own name
    is a commit; else the folder's name."""
    snapshots, repository = folder.parent, folder.parent.parent.name
    if snapshots.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return folder.resolve().name if folder.name in ("", "..") else folder.name


def _demo() -> Path:
    try:
        folder = demo_folder()
        is_there = folder.is_dir()
    except OSError as error:
        raise ValueError(
            f"no model named, and no demo model can be looked for ({error})"
        ) from error
    if not is_there:
        raise ValueError(
            f"no model named, and the demo model is not in {folder}; name one, or run `make demo`"
        )
    say(f"no model named, using the demo model {folder.name}")
    return folder


def _local(name: str) -> Path | None:
    """The folder of that name, None if it can only be a hub id. Raises ValueError for a file, and
    for a path where there is nothing."""
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return path
        exists = os.path.lexists(path)
    except (OSError, RuntimeError, ValueError) as error:  # unreadable, no such user, a null byte
        raise ValueError(f"{name!r} can't be looked at ({error}); {GIVE}") from error
    if exists or path.suffix.lower() in OTHER_FORMATS:
        found = "is no folder" if exists else "is not there, and named like a file"
        raise ValueError(
            f"{name} {found}; nva reads folders with a config.json and weights in safetensors "
            f"files: {GIVE}"
        )
    is_path = path.is_absolute() or name.startswith((".", "~")) or "\\" in name
    if is_path or name.partition("@")[0].count("/") > 1:
        raise ValueError(f"there is no folder {name}; {GIVE}")
    return None


def _download(model: str) -> Path:
    """The folder of the hub's cache in which the model is now whole. `model` may end in
    "@revision": a branch, a tag or a commit."""
    from nva.models.checkpoint import open_checkpoint

    name, _, revision = model.partition("@")
    folder = _fetch(model, name, revision or None, CONFIGS)
    if not (folder / "tokenizer.json").is_file():
        _fetch(model, name, folder.name, OLD_TOKENIZERS)
    open_checkpoint(folder)  # a model that nva doesn't know is refused before its weights come
    if missing := _missing_weights(folder):
        _fetch(model, name, folder.name, missing, "its " + ", ".join(missing[:5]))
    if missing := _missing_weights(folder):
        raise ValueError(
            f"{folder} lacks {', '.join(missing[:5])}: {model} has no such file, or it was not "
            "downloaded; nva reads weights in safetensors files. Download them where there is a "
            "connection, or take another repository"
        )
    return folder


def _missing_weights(folder: Path) -> list[str]:
    """Of the shards that the index names, or of the one file where there is no index, those that
    are not there. Whether the index is right is judged where it is read, in models/checkpoint.py.
    """
    from nva.models.files import INDEX, SINGLE

    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        names = sorted(set(index["weight_map"].values()))
        shards = [name for name in names if Path(name).name == name]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        shards = []
    return [name for name in shards or [SINGLE] if not (folder / name).is_file()]


def check_files(folder: Path) -> None:
    """Open each file of a checkpoint that is there: one that can't be read must not pass for one
    that is missing. Raises OSError for a broken link, a folder, or a file without permission, and
    ValueError for a config that holds no JSON object."""
    from nva.models.files import read_json

    names = [name for name in (*CONFIGS, *OLD_TOKENIZERS) if os.path.lexists(folder / name)]
    for name in names:
        (folder / name).open("rb").close()
        if name.endswith(".json") and name not in LARGE:
            read_json(folder / name)


def _fetch(
    model: str, name: str, revision: str | None, files: Sequence[str], what: str = ""
) -> Path:
    """The snapshot's folder with those of the files that the repository has."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except HFValidationError as error:
        raise ValueError(f"{model!r} is neither a folder nor a hub id: {_line(error)}") from error
    except Exception as error:  # of the hub, of its cache's files, or of the network's library
        raise ValueError(
            f"there is no folder {model}, and the hub can't give {what or 'a model of that name'} "
            f"({_line(error)}); check the name and the connection, or download it elsewhere and "
            "give its folder"
        ) from error


def _line(error: Exception) -> str:
    """What an error says, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else text[:400] + "..."
