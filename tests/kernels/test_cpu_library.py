"""How the compiled kernels are built and kept: once, whole, and in whatever folder can keep them."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import filelock
import pytest

from nva.kernels.cpu import build, library

SOURCE = "long panel_width(void) { return 7; } void limit_threads(long n) { (void)n; }"
COMPILER = """#!/bin/sh
case "$*" in
  *--version*) echo 1.0;;
  *-shared*) echo built >> {log}; {wait}; cp {tiny} "{out}";;
esac
"""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with the two functions that loading calls."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "tiny.c").write_text(SOURCE)
    command = ["gcc", "-shared", "-fPIC", "tiny.c", "-o", "tiny.so"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "tiny.so"


class Builds:
    """Where this test's files are, and how often its compiler has built."""

    def __init__(self, folder: Path, tiny: Path, wait: str = ":") -> None:
        self.cache, self.log = folder / "cache", folder / "log"
        self.log.touch()
        compiler = folder / "compiler"
        text = COMPILER.format(log=self.log, tiny=tiny, wait=wait, out="$(eval echo \\${$#})")
        compiler.write_text(text)
        compiler.chmod(0o755)
        (folder / "tmp").mkdir()
        self.environment = {
            "CXX": str(compiler),
            "XDG_CACHE_HOME": str(self.cache),
            "TMPDIR": str(folder / "tmp"),
        }

    @property
    def count(self) -> int:
        return len(self.log.read_text().splitlines())

    @property
    def kept(self) -> list[Path]:
        return sorted(self.cache.glob("nva/kernels/*.so"))


@pytest.fixture
def builds(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Builds:
    found = Builds(tmp_path, tiny)
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", None)  # so that TMPDIR is read again
    return found


def assert_loads() -> None:
    assert library.library().panel_width() == 7


def test_a_library_is_compiled_once(builds: Builds, said: Callable[[], str]) -> None:
    for _ in range(2):
        assert_loads()
    assert builds.count == 1
    assert said().count("compiling the CPU kernels, once; they are kept in") == 1
    (kept,) = builds.kept
    assert [path.suffix for path in kept.parent.iterdir() if path != kept] == [".lock"]


@pytest.mark.parametrize("n_bytes", [0, 100, 5000])
@pytest.mark.parametrize("how", ["cut short", "a bit is wrong"])
def test_a_damaged_library_is_compiled_again(
    builds: Builds, n_bytes: int, how: str, said: Callable[[], str]
) -> None:
    """The loader would map it, and the process would die of SIGBUS or SIGSEGV."""
    content = Path(build_once(builds)).read_bytes()
    damaged = content[:n_bytes]
    if how == "a bit is wrong":
        damaged += bytes([content[n_bytes] ^ 1]) + content[n_bytes + 1 :]
    builds.kept[0].write_bytes(damaged)
    assert_loads()
    assert builds.count == 2
    assert builds.kept[0].read_bytes() == content
    assert "is damaged and is compiled again" in said()


def build_once(builds: Builds) -> str:
    """The kept file, made by another process: this one has it loaded by no name."""
    code = "from nva.kernels.cpu.library import library; library()"
    environment = {**os.environ, **builds.environment, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
    return str(builds.kept[0])


def test_processes_that_start_together_compile_once(tmp_path: Path, tiny: Path) -> None:
    builds = Builds(tmp_path, tiny, wait="sleep 1")
    code = "from nva.kernels.cpu.library import library; assert library().panel_width() == 7"
    environment = {**os.environ, **builds.environment, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    started = [subprocess.Popen(command, env=environment) for _ in range(3)]
    assert [process.wait() for process in started] == [0, 0, 0]
    assert builds.count == 1


@pytest.mark.parametrize("cause", ["a file is in the way", "no folder can be made", "noexec"])
def test_another_folder_keeps_what_the_first_cannot(
    builds: Builds,
    cause: str,
    monkeypatch: pytest.MonkeyPatch,
    said: Callable[[], str],
) -> None:
    if cause == "a file is in the way":
        builds.cache.write_text("")
    elif cause == "no folder can be made":
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no such folder")
    else:
        statvfs, cache = os.statvfs, builds.cache

        def noexec(path: Path) -> os.statvfs_result:
            found = statvfs(path)
            is_ours = str(path).startswith(str(cache))
            fields = [*found[:8], found.f_flag | os.ST_NOEXEC, found.f_namemax]
            return os.statvfs_result(fields) if is_ours else found

        monkeypatch.setattr(os, "statvfs", noexec)
    for _ in range(2):
        assert_loads()
    assert builds.count == 1
    assert "no place for the compiled CPU kernels" in said()
    assert len(list(Path(tempfile.gettempdir()).glob("nva-*/*.so"))) == 1


def test_where_no_folder_keeps_it_the_library_is_compiled_for_the_process(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    """It says so at each start, and leaves nothing behind."""
    fsync = os.fsync
    room = [False, False, True]

    def full(file: int) -> None:
        if not room.pop(0):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(file)

    monkeypatch.setattr(os, "fsync", full)
    assert_loads()
    text = said()
    assert text.count("No space left on device") == 2
    assert "compiled at every start; set XDG_CACHE_HOME" in text
    assert builds.count == 1, "compiled once for all folders"
    left = [path for path in builds.cache.parent.rglob("*") if path.suffix in (".so", ".part")]
    assert left == []


def test_a_disk_without_room_at_all_is_a_reason(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(build.BuildError, match="can't be loaded from anywhere .*No space left"):
        library.library()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOLCK, "No locks available"),
        NotImplementedError("no flock"),
        filelock.Timeout("cpu.lock"),
    ],
)
def test_where_no_lock_can_be_had_it_compiles_without(
    builds: Builds,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    said: Callable[[], str],
) -> None:
    """As on some NFS mounts, or beside a process that hangs with the lock."""

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(library.FileLock, "acquire", refuse)
    for _ in range(2):
        assert_loads()
    assert builds.count == 1
    assert "can't be locked" in said()


def test_what_a_killed_build_left_is_removed(builds: Builds) -> None:
    folder = builds.cache / "nva" / "kernels"
    folder.mkdir(parents=True)
    old, new = folder / "cpu-1-x.part", folder / "cpu-2-x.part"
    for path in (old, new):
        path.touch()
    os.utime(old, (0, 0))
    assert_loads()
    assert not old.exists()
    assert new.exists(), "another process may be writing it"


def test_a_library_that_does_not_load_here_is_not_the_end(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    """As on a mount that forbids it without saying so."""
    cdll, refused = ctypes.CDLL, []

    def refuse(path: str) -> ctypes.CDLL:
        if path.startswith(str(builds.cache)):
            refused.append(path)
            raise OSError(f"{path}: failed to map segment from shared object")
        return cdll(path)

    monkeypatch.setattr(library.ctypes, "CDLL", refuse)
    assert_loads()
    assert refused
    assert "failed to map segment" in said()


def test_a_compiler_that_fails_is_quoted(builds: Builds, tmp_path: Path) -> None:
    (tmp_path / "compiler").write_text("#!/bin/sh\necho 'error: out of order' >&2\nexit 1\n")
    with pytest.raises(build.BuildError, match=r"kernels failed \(error: out of order\)"):
        library.library()
    assert not builds.kept


def test_a_compiler_that_was_killed_is_told_of(builds: Builds, tmp_path: Path) -> None:
    (tmp_path / "compiler").write_text('#!/bin/sh\n[ "$1" = --version ] || kill -9 $$\n')
    with pytest.raises(build.BuildError, match=r"kernels failed \(exit status -9\)"):
        library.library()


def test_a_compiler_that_is_named_and_not_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "g++-99")
    with pytest.raises(build.BuildError, match=r"CXX is 'g\+\+-99', which is no program"):
        library.library()


def test_without_a_compiler_the_reference_serves_and_says_so(tmp_path: Path) -> None:
    code = (
        "from nva.kernels import backend\n"
        "from nva.kernels.cpu.device import PLAIN\n"
        "assert backend('cpu') is backend('cpu') is PLAIN"
    )
    env = {"PATH": "", "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    reason = "no C++ compiler was found to build the CPU kernels with; install g++"
    assert found.stderr.count(reason) == 1


def test_windows_gets_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(build.BuildError, match="compiled on Linux and macOS only"):
        library.library()
