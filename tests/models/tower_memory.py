"""How much memory the vision tower takes for an image of noise: a program of its own, since only a
process can be measured.

    python -m tests.models.tower_memory FOLDER ROWS COLUMNS FEATURES.npy
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

from nva.kernels import backend
from nva.models import load_checkpoint
from nva.models.vision import encode_image
from nva.state.media import Image, image


def noise(patch_size: int, n_rows: int, n_columns: int) -> Image:
    """An image of n_rows * n_columns features, each of four patches."""
    shape = (4 * n_rows * n_columns, 3 * 2 * patch_size**2)
    patches = np.random.default_rng(0).standard_normal(shape, np.float32)
    return image(patches, n_rows, n_columns)


def mebibytes(name: str) -> float:
    """An entry of this process's status: VmRSS now, or VmHWM, the most since it was reset."""
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in status if line.startswith(f"{name}:"))
    return int(line.split()[1]) / 1024


def main(folder: str, n_rows: str, n_columns: str, features: str) -> None:
    kernels = backend("cpu").kernels
    checkpoint, params = load_checkpoint(folder, "float32", kernels=kernels)
    spec = checkpoint.spec.vision
    assert spec is not None
    seen = noise(spec.patch_shape[-1], int(n_rows), int(n_columns))
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = mebibytes("VmRSS")
    with torch.inference_mode():
        found = encode_image(spec, kernels, params["vision"], seen, torch.device("cpu"))
    print(json.dumps({"mebibytes": mebibytes("VmHWM") - before}))
    np.save(features, found.numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])
