"""What pyproject.toml allows is what is tested: its lower bounds are the oldest versions that the
suite runs with, and constraints.txt, the newest, lies above them."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
UNTESTED = {"torch"}  # of which one version is tested: another is 200 MB, and needs its own kernels


def bounds() -> dict[str, str]:
    """The lower bound of every dependency, also of those that only images need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["vision"]]
    return dict(re.fullmatch(r"([\w-]+)>=([\d.]+)", each.lower()).groups() for each in listed)


def pinned(name: str) -> dict[str, str]:
    lines = re.findall(r"^([\w-]+)==(\S+)$", (ROOT / name).read_text(), re.MULTILINE)
    return {package.lower(): version for package, version in lines}


def numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def test_the_lowest_versions_allowed_are_the_oldest_tested():
    allowed = bounds()
    assert {name: allowed[name] for name in allowed.keys() - UNTESTED} == pinned(
        "constraints-oldest.txt"
    )


def test_the_versions_installed_are_allowed():
    newest = pinned("constraints.txt")
    for name, version in bounds().items():
        assert numbers(newest[name]) >= numbers(version)
