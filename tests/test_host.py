"""What nva asks of its machine: folders, cores, OpenMP's settings and forks."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from nva.host import cores, openmp
from nva.host.cache_folder import cache_folder, temporary_folder
from nva.host.forks import lock_across_forks


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_cache_folder_is_xdg_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache" / "nva"
    for other in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", other)
        assert cache_folder() == tmp_path / ".cache" / "nva"


@pytest.mark.parametrize("home", [None, "relative"])
def test_a_user_without_a_home_has_a_cache_folder(
    home: str | None, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As OpenShift's random user ids: no HOME, and no line in /etc/passwd."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)

    def unknown(user: int) -> object:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert cache_folder() == temporary / f"nva-{os.getuid()}"
    assert cache_folder().stat().st_mode & 0o777 == 0o700


def test_a_temporary_folder_that_others_may_write_to_is_refused(temporary: Path) -> None:
    """They could put a library there, and this user would run it."""
    folder = temporary_folder()
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="others may write to it"):
        temporary_folder()
    folder.rmdir()
    (temporary / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(temporary / "elsewhere")
    with pytest.raises(PermissionError, match="belongs to someone else"):
        temporary_folder()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "10000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "5:cpuset:/x\n4:cpu,cpuacct:/y\n",
                "sys/fs/cgroup/cpu/y/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/y/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/y\n",
                "sys/fs/cgroup/cpu/y/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/y/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense\n"}, None),
    ],
)
def test_a_quota_of_a_control_group_is_a_number_of_cores(
    files: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores.cpu_quota(tmp_path) == expected
    assert cores.n_cores(tmp_path) == min(len(os.sched_getaffinity(0)), expected or 1 << 20)


@pytest.mark.parametrize(
    ("given", "quota", "expected"),
    [
        ({}, None, {"GOMP_SPINCOUNT": "1000"}),
        ({}, 1, {"GOMP_SPINCOUNT": "1000", "OMP_NUM_THREADS": "1"}),
        ({"OMP_WAIT_POLICY": "active"}, None, {"OMP_WAIT_POLICY": "active"}),
        ({"GOMP_SPINCOUNT": "7"}, None, {"GOMP_SPINCOUNT": "7"}),
        (
            {"OMP_NUM_THREADS": "3"},
            1,
            {"GOMP_SPINCOUNT": "1000", "OMP_NUM_THREADS": "3"},
        ),
    ],
)
def test_openmp_is_set_up_where_the_user_has_not(
    given: dict[str, str],
    quota: int | None,
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openmp, "cpu_quota", lambda: quota)
    monkeypatch.setattr(openmp, "n_cores", lambda: quota)
    environment: dict[str, str] = dict(given)
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(sys, "modules", {"torch": None})
    openmp.set_up_openmp()
    assert environment == given, "torch has read its settings already"
    monkeypatch.setattr(sys, "modules", {})
    openmp.set_up_openmp()
    assert environment == expected


def test_importing_nva_sets_openmp_up_before_torch() -> None:
    code = "import os, sys, nva; assert 'torch' not in sys.modules; print(os.environ['GOMP_SPINCOUNT'])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("GOMP_SPINCOUNT", None)
    environment.pop("OMP_WAIT_POLICY", None)
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, env=environment, text=True) == "1000\n"


def test_a_fork_waits_for_a_lock_and_the_child_finds_it_free() -> None:
    """Run in a process of its own, since this one has many threads."""
    code = """
import os, signal, threading, time, nva
from nva.host.forks import lock_across_forks
signal.alarm(30)
lock, is_held, steps = lock_across_forks(), threading.Event(), []
def hold():
    with lock:
        is_held.set()
        time.sleep(0.3)
        steps.append("done")
other = threading.Thread(target=hold)
other.start()
is_held.wait()
child = os.fork()
if child == 0:
    signal.alarm(10)
    with lock: os._exit(0 if steps == ["done"] else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
with lock: print("free")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment) == b"free\n"


def test_the_lock_is_reentrant() -> None:
    lock = lock_across_forks()
    with lock, lock:
        found: list[bool] = []
        other = threading.Thread(target=lambda: found.append(lock.acquire(blocking=False)))
        other.start()
        other.join()
    assert found == [False]
