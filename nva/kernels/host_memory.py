"""How much memory of this machine a cache may still take.

The law: reclaimable page cache counts as free; a container's (cgroup) limit counts as all the
memory there is; what can't be found out is an error that says what to give instead. Read next:
cpu/device.py, which asks."""

from __future__ import annotations

import os
from pathlib import Path

_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")
"""Of cgroup v1 and v2: the files with a group's limit and its use, and the field of memory.stat
that counts reclaimable page cache."""


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that can be had: of the machine's memory, and of the limit of every cgroup around this
    process.

    Raises ValueError where the system tells neither what is free nor how much memory there is.
    """
    return max(0, min([_of_machine(root), *_of_groups(root)]))


def _of_machine(root: Path) -> int:
    """What Linux says is available without swapping; elsewhere half of all memory, which is all
    that is known."""
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        raise ValueError(
            "this system doesn't tell how much memory it has; give cache_memory or n_blocks"
        ) from None


def _of_groups(root: Path) -> list[int]:
    """What is left of each limit: of the process's group and all above it. A container sees its own
    as the top."""
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = _V1 if controllers else _V2  # a line of v2 names no controllers
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        inner = top / path.lstrip("/")
        folders = [each for each in (inner, *inner.parents) if each.is_relative_to(top)]
        found += [_left(folder, *names) for folder in folders]
    return [left for left in found if left is not None]


def _left(folder: Path, limit: str, usage: str, droppable: str) -> int | None:
    """The limit less what is used and can't be dropped; None without a limit."""
    most, used = _lines(folder / limit), _lines(folder / usage)
    if not most or not used or not most[0].isdigit():  # v2 writes "max"
        return None
    fields = dict(line.split() for line in _lines(folder / "memory.stat"))
    return int(most[0]) - int(used[0]) + int(fields.get(droppable, 0))


def _lines(path: Path) -> list[str]:
    """The lines of a text file, none where it can't be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
