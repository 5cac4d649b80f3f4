"""Install the oldest versions that pyproject.toml allows into a folder of their own, which a test
run puts before the environment's packages.

    .venv/bin/python scripts/oldest_env.py .venv-oldest
    PYTHONPATH=.venv-oldest .venv/bin/python -m pytest tests/test_text.py

torch is the environment's. The one law: what a stamp file vouches for isn't done again."""

from __future__ import annotations

import hashlib
import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import sys

OLDEST = pathlib.Path(__file__).parent.parent / "constraints-oldest.txt"


def versions() -> dict[str, str]:
    """The version of each package that is to be installed, by its name in lower case."""
    pairs = re.findall(r"^([\w-]+)==(\S+)$", OLDEST.read_text(), re.MULTILINE)
    return {name.lower(): version for name, version in pairs}


def install(folder: pathlib.Path) -> None:
    """The packages and what they need, in an empty folder; raises if others came than were
    asked for."""
    shutil.rmtree(folder, ignore_errors=True)
    wanted = [f"{name}=={version}" for name, version in versions().items()]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    subprocess.run([*pip, *wanted], check=True)
    found = importlib.metadata.distributions(path=[str(folder)])
    installed = {each.metadata["Name"].lower(): each.version for each in found}
    for name, version in versions().items():
        assert installed.get(name) == version, f"{name} is {installed.get(name)}, not {version}"


def main(folder: pathlib.Path) -> None:
    """Bring the folder up to date."""
    key = hashlib.sha256(OLDEST.read_bytes() + sys.version.encode()).hexdigest()
    stamp = folder / "installed"
    if not stamp.exists() or stamp.read_text() != key:
        install(folder)
        stamp.write_text(key)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).absolute())
