"""The safetensors files of a checkpoint folder: which there are, and the tensors they hold.

The law: files are memory-mapped and nothing in them is executed; a file that is missing, truncated
or misnamed is a ValueError that says what to do. Read next: checkpoint.py, which holds the tensors
against what a model needs.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

Files = dict[str, Any]
"""Tensor name -> the open file that holds it."""


def open_tensors(folder: Path) -> Files:
    """Every tensor of the folder. The index decides, if there is one: other files, left by an
    earlier download or made for another program, are not looked at. Without an index,
    model.safetensors is all there is."""
    if not (folder / INDEX).is_file():
        return dict.fromkeys(*_open_file(_single_file(folder)))
    placed = read_json(folder / INDEX).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
        raise ValueError(
            f"{folder / INDEX} has no weight_map from tensors to files; download it again"
        )
    files: Files = {}
    for file_name in sorted(set(placed.values())):
        names, file = _open_file(_shard(folder, file_name))
        if wrong := set(names) ^ {name for name, at in placed.items() if at == file_name}:
            raise ValueError(
                f"{file_name} and {INDEX} disagree on {some_names(wrong)}; download both again"
            )
        files |= dict.fromkeys(names, file)
    return files


def _single_file(folder: Path) -> Path:
    if (folder / SINGLE).is_file():
        return folder / SINGLE
    pickles = sorted(
        path.name for suffix in ("bin", "pt", "pth", "ckpt") for path in folder.glob(f"*.{suffix}")
    )
    if pickles:
        raise ValueError(
            f"{folder} has weights in {some_names(pickles)}, which may hold code and is never "
            f"loaded; convert it to {SINGLE}"
        )
    raise ValueError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}")


def _shard(folder: Path, name: str) -> Path:
    if Path(name).name != name:
        raise ValueError(f"{INDEX} names the file {name!r}; files must lie in the folder itself")
    if not (folder / name).is_file():
        raise ValueError(f"{folder} lacks {name}, which {INDEX} names; download it")
    return folder / name


def _open_file(path: Path) -> tuple[list[str], Any]:
    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is truncated or no safetensors file ({error}); download it again"
        ) from error
    return list(file.keys()), file


def read_tensor(files: Files, name: str) -> Tensor:
    """A tensor, its memory mapped from the file."""
    return files[name].get_tensor(name)


def unmap(tensor: Tensor) -> None:
    """Let go of the memory pages of a tensor that was read and is not needed again. A mapped file's
    would stay with the process until the file is closed, and weigh as much as the weights
    themselves."""
    if sys.platform != "linux":
        return
    # Only pages that hold nothing else.
    first = -(-tensor.data_ptr() // mmap.PAGESIZE)
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE
    if first < end:
        address = ctypes.c_void_p(first * mmap.PAGESIZE)
        n_bytes = ctypes.c_size_t((end - first) * mmap.PAGESIZE)
        ctypes.CDLL(None).madvise(address, n_bytes, mmap.MADV_DONTNEED)


def some_names(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    ordered = sorted(names)
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file holds. Raises ValueError, naming the file, if it holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object; download it again")
    return content
