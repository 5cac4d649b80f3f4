"""Photographs: memory grows with the number of patches, not with its square, and the features are
transformers'."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from tests.checkpoints import randomize
from tests.models.test_qwen3_vl import TEXT, TOKENS, VISION
from tests.models.tower_memory import noise

TOWER = {**VISION, "depth": 1, "patch_size": 16, "deepstack_visual_indexes": [0]}

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="a process's memory is read from /proc"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tower")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    config = Qwen3VLConfig(text_config=TEXT, vision_config=TOWER, **TOKENS)
    model = Qwen3VLForConditionalGeneration(config).eval()
    randomize(model, seed=0)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("n_rows", "n_columns", "most"),
    [
        # 1,024 * 1,024 pixels are 4,096 patches; their scores alone would be 268 MB.
        (32, 32, 60),
        # 4,000 * 3,008 pixels are 47,000 patches; their scores would be 35 GB.
        pytest.param(94, 125, 500, marks=pytest.mark.slow),
    ],
)
def test_memory_and_features(
    model: PreTrainedModel, folder: Path, n_rows: int, n_columns: int, most: int
) -> None:
    file = folder / "features.npy"
    program = [sys.executable, "-m", "tests.models.tower_memory"]
    done = subprocess.run(
        [*program, str(folder), str(n_rows), str(n_columns), str(file)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["mebibytes"] < most

    patches = torch.from_numpy(noise(16, n_rows, n_columns).patches.copy())
    grid = torch.tensor([[1, 2 * n_rows, 2 * n_columns]])
    with torch.inference_mode():
        theirs = model.model.visual(patches, grid_thw=grid)
    expected = torch.stack([theirs.pooler_output, *theirs.deepstack_features])
    found = torch.from_numpy(np.load(file))
    assert float((found - expected).abs().max() / expected.std()) < 1e-3
