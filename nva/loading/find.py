"""From a model's name to its folder: a local one, a hub id, or the demo model."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from nva.host.cache_folder import cache_folder

DEMO_MODEL = "SmolLM2-135M-Instruct"


def find_model(model: str | Path | None) -> Path:
    """The model's folder, downloaded from the hub if need be. Raises ValueError if it can't be
    had."""
    if model is None:
        model = os.environ.get("NVA_MODEL")
    if model is None:
        model = demo_folder()
        if not model.is_dir():
            raise ValueError(
                f"no model named, and the demo model is not in {model}; name one, or run `make "
                "demo`"
            )
        print(f"nva: no model named, using the demo model {model.name}", file=sys.stderr)
    if not isinstance(model, (str, os.PathLike)):
        raise ValueError(
            f"model is {model!r}; give a checkpoint's folder or a hub id such as Qwen/Qwen3-0.6B"
        )
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or str(model).count("/") > 1 or str(model).startswith("."):
        raise ValueError(
            f"there is no folder {model}; give a checkpoint's folder or a hub id such as "
            "Qwen/Qwen3-0.6B"
        )
    return _download(str(model))


def demo_folder() -> Path:
    """Where scripts/demo_model.py puts the demo model."""
    return cache_folder() / DEMO_MODEL


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(model, allow_patterns=wanted))
    except HFValidationError as error:
        raise ValueError(f"{model!r} is neither a folder nor a hub id: {error}") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"there is no folder {model}, and the hub can't give a model of that name ({error}); "
            "check the name and the connection, or download it elsewhere and give its folder"
        ) from error
