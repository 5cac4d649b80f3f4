"""Where torch_npu is installed and CANN is not, torch itself can't be imported; the doctor can, and
says what to do."""

from __future__ import annotations

import os
import subprocess
import sys


def run(*arguments):
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment
    )


def test_torch_does_not_load():
    assert "Failed to load the backend extension: torch_npu" in run("-c", "import torch").stderr


def test_the_doctor_does():
    found = run("-m", "nva", "doctor")
    assert found.returncode == 1
    assert "cannot open shared object file" in found.stdout
    assert "source CANN's set_env.sh" in found.stdout
