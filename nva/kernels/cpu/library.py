"""The compiled kernels as a loaded library, kept from one start to the next.

The law: what is loaded is whole. A kept file's name ends with a hash of its bytes, which is checked
first, because the loader trusts a damaged file and crashes on it. A folder that can't keep a file
(read-only, full, mounted noexec, without locks) costs a line, not an error: the next folder is
tried. Read next: build.py, which compiles; operators.py, which calls the library."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock

from nva.host.cache_folder import cache_folder, temporary_folder
from nva.host.cores import cpu_quota
from nva.host.messages import say
from nva.kernels.cpu import build
from nva.kernels.cpu.build import BuildError

LONGEST_WAIT = 300
"""Seconds to wait for another process that compiles."""

STALE = 3600
"""Seconds after which an unfinished file belongs to a process that was killed."""


def library() -> ctypes.CDLL:
    """The library, compiled if no folder has it. Raises BuildError without a compiler, where it
    fails, or where nothing can be loaded."""
    if sys.platform == "win32":
        raise BuildError("the CPU kernels are compiled on Linux and macOS only")
    found = _loaded(build.key(), functools.cache(build.compiled))
    found.limit_threads.argtypes = (ctypes.c_int64,)
    found.limit_threads(cpu_quota() or sys.maxsize)
    return found


def _loaded(key: str, compiled: Callable[[], bytes]) -> ctypes.CDLL:
    for place in (lambda: cache_folder() / "kernels", temporary_folder):
        try:
            return _kept(place(), key, compiled)
        except OSError as error:
            say(f"no place for the compiled CPU kernels: {error}", logging.WARNING)
    say(
        "the CPU kernels are compiled at every start; set XDG_CACHE_HOME to a folder that can "
        "keep them",
        logging.WARNING,
    )
    try:
        with tempfile.TemporaryDirectory(prefix="nva-kernels-") as folder:
            return ctypes.CDLL(str(_keep(Path(folder), key, compiled())))
    except OSError as error:
        raise BuildError(f"the CPU kernels can't be loaded from anywhere ({error})") from error


def _kept(folder: Path, key: str, compiled: Callable[[], bytes]) -> ctypes.CDLL:
    """The library from a folder, put there if it isn't. Raises OSError where that fails."""
    path = _whole(folder, key)
    if path is None:
        folder.mkdir(parents=True, exist_ok=True)
        _check_use(folder)
        with _locked(folder / f"cpu-{key}.lock"):
            path = _whole(folder, key)  # another process may have built it in the meantime
            if path is None:
                _remove_damaged(folder, key)
                say(f"compiling the CPU kernels, once; they are kept in {folder}")
                path = _keep(folder, key, compiled())
    return ctypes.CDLL(str(path))


def _whole(folder: Path, key: str) -> Path | None:
    """The kept library whose bytes are those that were written."""
    for path in sorted(folder.glob(f"cpu-{key}-*.so")):
        if path.name == _name(key, path.read_bytes()):
            return path
    return None


def _name(key: str, content: bytes) -> str:
    return f"cpu-{key}-{hashlib.sha256(content).hexdigest()[:16]}.so"


def _check_use(folder: Path) -> None:
    """Raises OSError where nothing can be written or loaded, before time goes into compiling."""
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise OSError(errno.EACCES, "mounted noexec, so no library can be loaded", str(folder))
    with tempfile.TemporaryFile(dir=folder):
        pass


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file's lock: processes that start together compile once. Without a lock (NFS may have
    none) each compiles, and the last to finish replaces the file of the others."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=LONGEST_WAIT)
    except (OSError, NotImplementedError) as error:  # a timeout is an OSError
        say(f"{path} can't be locked ({error}); other processes may compile the same", logging.INFO)
    try:
        yield
    finally:
        lock.release()


def _remove_damaged(folder: Path, key: str) -> None:
    """Delete files that aren't whole: those that a disk cut short, and what a killed process
    left."""
    for path in folder.glob(f"cpu-{key}-*.so"):
        say(f"{path} is damaged and is compiled again", logging.WARNING)
        path.unlink(missing_ok=True)
    for path in folder.glob("cpu-*.part"):
        with contextlib.suppress(OSError):  # another process's, or gone
            if time.time() - path.stat().st_mtime > STALE:
                path.unlink()


def _keep(folder: Path, key: str, content: bytes) -> Path:
    """Write the library; it has its name when all of it is on the disk."""
    path = folder / _name(key, content)
    file, part = tempfile.mkstemp(dir=folder, prefix=f"cpu-{key}-", suffix=".part")
    try:
        with open(file, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(part, 0o755)  # another user of a shared cache loads it too
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise
    return path
