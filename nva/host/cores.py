"""How many cores this process may use.

The law: a container's CPU quota counts as well as the affinity mask. With more threads than that
the system stops all of them for the rest of each period (throttling)."""

from __future__ import annotations

import os
from pathlib import Path


def n_cores(root: Path = Path("/")) -> int:
    """Cores that the scheduler grants: of the affinity mask, at most the cgroup quota."""
    has_mask = hasattr(os, "sched_getaffinity")
    n = len(os.sched_getaffinity(0)) if has_mask else os.cpu_count() or 1
    return min(n, cpu_quota(root) or n)


def cpu_quota(root: Path = Path("/")) -> int | None:
    """The cgroup quota in cores, rounded up; None without one."""
    return min(_quotas(root), default=None)


def _quotas(root: Path) -> list[int]:
    """The quota of the process's control group (cgroup v2 or v1) and of all above it."""
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        inner = top / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(top):
                found += _quota(folder)
    return found


def _quota(folder: Path) -> list[int]:
    """Cores, rounded up; empty without a limit, which v2 writes as "max" and v1 as -1."""
    numbers = " ".join(_lines(folder / "cpu.max")).split()
    if not numbers:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        numbers = [word for name in names for word in _lines(folder / name)]
    if len(numbers) != 2 or not all(word.isdigit() for word in numbers):
        return []
    quota, period = map(int, numbers)
    return [-(-quota // period)] if quota and period else []


def _lines(path: Path) -> list[str]:
    """The lines of a text file, none where it can't be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
