"""From the C++ files beside this one to a shared library, by the machine's own compiler.

The law: a key names the sources, the compiler and the processor, so that two builds of one key
compute the same. The library is plain C at its border: no header of torch or Python is needed, none
of their versions can break it, and it compiles in seconds. Read next: library.py, which keeps what
is built here."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math")


class BuildError(RuntimeError):
    """The kernels can't be compiled or loaded here."""


def key() -> str:
    """A hash of all that the library depends on. Raises BuildError without a compiler."""
    compiler = find_compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    parts = [path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]*"))]
    names = (compiler, *_flags(), _processor(), *platform.libc_ver())
    parts += [version, *(text.encode() for text in names)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def compiled() -> bytes:
    """The library. Every source is compiled at once. Raises BuildError where the compiler fails,
    and OSError without a temporary folder to work in."""
    compiler, flags = find_compiler(), _flags()
    with tempfile.TemporaryDirectory(prefix="nva-build-") as folder:
        objects = {
            source: Path(folder, source.stem + ".o") for source in sorted(SOURCES.glob("*.cpp"))
        }
        _run(
            [
                [compiler, *flags, "-c", str(source), "-o", str(out)]
                for source, out in objects.items()
            ]
        )
        whole = Path(folder, "kernels.so")
        _run([[compiler, "-shared", *flags, *map(str, objects.values()), "-o", str(whole)]])
        return whole.read_bytes()


def find_compiler() -> str:
    """The path of CXX where it is set, else of the first compiler found. Raises BuildError."""
    named = os.environ.get("CXX")
    for name in (named,) if named else ("g++", "c++", "clang++"):
        if found := shutil.which(name):
            return found
    if named:
        raise BuildError(f"CXX is {named!r}, which is no program that can be found")
    raise BuildError(
        "no C++ compiler was found to build the CPU kernels with; install g++ (or name one in CXX)"
    )


def _flags() -> tuple[str, ...]:
    is_arm = platform.machine() in ("aarch64", "arm64")
    return (*FLAGS, "-mcpu=native" if is_arm else "-march=native")


def _processor() -> str:
    """What this processor can do: its instruction sets, by the kernel's list where there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next(
        (line for line in lines if line.startswith(("flags", "Features"))), platform.processor()
    )


def _run(commands: list[list[str]]) -> None:
    """Run commands side by side. Raises BuildError with the first line that says what is wrong."""
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate()[1] for process in started]
    for process, text in zip(started, errors, strict=True):
        if process.returncode:
            first = next((line for line in text.splitlines() if "error" in line), text.strip())
            reason = first or f"exit status {process.returncode}"  # negative: killed by a signal
            raise BuildError(f"compiling the CPU kernels failed ({reason})")
