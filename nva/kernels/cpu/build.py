"""From the C++ files beside this one to a loaded library, compiled once for each machine, compiler
and source.

The law: a library in the cache is complete, and made of these sources for this processor; its name
is a hash of both. It is plain C at its border: no header of torch or Python is needed, none of
their versions can break it, and it compiles in seconds. Read next: operators.py, which calls it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math")


class BuildError(RuntimeError):
    """The kernels can't be compiled here."""


def library() -> ctypes.CDLL:
    """The library, compiled if the cache has none. Raises BuildError without a compiler, or where
    it fails."""
    if fcntl is None:
        raise BuildError("the CPU kernels are compiled on Linux and macOS only")
    compiler = _compiler()
    flags = (
        *FLAGS,
        "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native",
    )
    path = _cache() / f"cpu-{_key(compiler, flags)}.so"
    if not path.exists():
        with _locked(path.with_suffix(".lock")):
            if not path.exists():  # nobody else built it while we waited
                print("nva: compiling the CPU kernels, once", file=sys.stderr)
                _build(path, compiler, flags)
    return ctypes.CDLL(str(path))


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError(
        "no C++ compiler was found to build the CPU kernels with; install g++ (or name one in CXX)"
    )


def _cache() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nva" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    except OSError:  # a home that can't be written to
        return Path(tempfile.mkdtemp(prefix="nva-kernels-"))


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    parts = [path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]*"))]
    parts += [version, *(text.encode() for text in (compiler, *flags, _processor(), *_openmp()))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _processor() -> str:
    """What this processor can do: its instruction sets, by the kernel's list where there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next(
        (line for line in lines if line.startswith(("flags", "Features"))), platform.processor()
    )


@functools.cache
def _openmp() -> tuple[str, ...]:
    """The OpenMP runtime that torch has loaded, for the linker: with another one, each would keep
    its own threads."""
    folder, name = (
        Path(torch.__file__).parent,
        "libomp*.dylib" if sys.platform == "darwin" else "libgomp*",
    )
    return tuple(
        str(path)
        for place in (folder / "lib", folder.with_name("torch.libs"))
        for path in place.glob(name)
    )


def _link_flags() -> tuple[str, ...]:
    """torch's OpenMP, and where a Mac's loader finds it; its linker has no --as-needed."""
    if sys.platform == "darwin":
        return (*_openmp(), *(f"-Wl,-rpath,{Path(path).parent}" for path in _openmp()))
    return ("-Wl,--as-needed", *_openmp())


class _locked:
    """Hold a file's lock for a `with`; processes that start together compile once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        self.file = self.path.open("w")
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self.file.close()


def _build(path: Path, compiler: str, flags: tuple[str, ...]) -> None:
    """Compile every source at once, link, and move the whole library to its place."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = {
            source: Path(folder, source.stem + ".o") for source in sorted(SOURCES.glob("*.cpp"))
        }
        _run(
            [
                [compiler, *flags, "-c", str(source), "-o", str(out)]
                for source, out in objects.items()
            ]
        )
        whole = Path(folder, path.name)
        names = [str(out) for out in objects.values()]
        _run([[compiler, "-shared", *names, *_link_flags(), *flags, "-o", str(whole)]])
        os.replace(whole, path)


def _run(commands: list[list[str]]) -> None:
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate()[1] for process in started]
    for process, text in zip(started, errors, strict=True):
        if process.returncode:
            first = next((line for line in text.splitlines() if "error" in line), text.strip())
            raise BuildError(f"compiling the CPU kernels failed ({first})")
