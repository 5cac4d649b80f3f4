"""What type checkers and editors see of nva in a user's script."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SCRIPT = """
from collections.abc import Sequence
from typing import assert_type

import nva

params = nva.SamplingParams(
    temperature=0.5, top_k=3, stop="x", stop_token_ids=[1], logit_bias={1: 2.0}, tag="me", seed=1
)
assert_type(params.temperature, float | None)
assert_type(params.stop, tuple[str, ...])
assert_type(nva.SamplingParams().n, int)
options = nva.Options(max_rows=3, device="cpu", policy="fcfs")
assert_type(options.max_rows, int)
engine = nva.load("folder", max_rows=3)
assert_type(engine, nva.Engine)
assert_type(nva.generate(engine, ["a"], params), list[nva.Completion])

nva.SamplingParams(temprature=1)  # wrong
nva.SamplingParams(temperature="hot")  # wrong
nva.SamplingParams(stop=5)  # wrong
nva.Options(max_row=3)  # wrong
nva.load("folder", max_row=3)  # wrong
"""


@pytest.mark.slow
def test_a_script_sees_types_and_its_mistakes(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    settings = {"extraPaths": [str(ROOT)], "typeCheckingMode": "standard", "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    line = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    run = subprocess.run([*line, "-p", tmp_path], capture_output=True, text=True, timeout=300)
    found = json.loads(run.stdout)["generalDiagnostics"]
    wrong = [i for i, text in enumerate(SCRIPT.split("\n")) if text.endswith("# wrong")]
    assert [each["range"]["start"]["line"] for each in found] == wrong, found


def test_an_editable_install_is_a_path(tmp_path: Path) -> None:
    """Not a hook that finds packages when Python imports them, which type checkers never run."""
    project = tmp_path / "project"
    project.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    (project / "nva").mkdir()
    for name in ("__init__.py", "py.typed"):
        shutil.copy(ROOT / "nva" / name, project / "nva")
    build = "from setuptools.build_meta import build_editable; build_editable('.')"
    line = [sys.executable, "-W", "ignore", "-c", build]
    subprocess.run(line, cwd=project, check=True, capture_output=True, timeout=300)
    wheel = next(project.glob("*.whl"))
    shutil.unpack_archive(wheel, tmp_path / "wheel", "zip")
    (path_file,) = (tmp_path / "wheel").glob("*.pth")
    assert path_file.read_text().strip() == str(project)
