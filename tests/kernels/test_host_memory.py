"""Free memory as Linux, containers and other systems tell it, from files made up for each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nva.kernels.host_memory import free_memory

MEMINFO = (
    "MemTotal: 24000000 kB\nMemFree: 1000000 kB\nMemAvailable: 20000000 kB\nCached: 19000000 kB\n"
)
AVAILABLE = 20_000_000 * 1024
GB = 10**9


def machine(root: Path, group: str = "0::/", **files: object) -> Path:
    """A root folder with these files, `__` standing for /."""
    contents = {"proc__meminfo": MEMINFO, "proc__self__cgroup": group, **files}
    for name, text in contents.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def limited(folder: str, limit: object, used: int, droppable: int = 0) -> dict[str, object]:
    """The files of a control group, of version 1 if its folder is called memory."""
    is_old = "__memory" in folder
    names = (
        ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
        if is_old
        else ("max", "current", "inactive_file")
    )
    place = f"sys__fs__cgroup{folder}__memory."
    return {
        f"{place}{names[0]}": limit,
        f"{place}{names[1]}": used,
        f"{place}stat": f"anon 5\n{names[2]} {droppable}",
    }


def test_cached_files_count_as_free(tmp_path: Path) -> None:
    assert free_memory(machine(tmp_path)) == AVAILABLE


@pytest.mark.parametrize(("version", "none"), [("0::", "max"), ("4:memory:", 9223372036854771712)])
def test_a_container_s_limit_is_the_machine_s_end(
    tmp_path: Path, version: str, none: object
) -> None:
    """Its group is the top of what it sees, whatever path it has outside."""
    top = "__memory" if "memory" in version else ""
    path = "/" if top == "" else "/docker/0123"
    assert (
        free_memory(machine(tmp_path / "a", version + path, **limited(top, 4 * GB, 3 * GB, GB)))
        == 2 * GB
    )
    assert (
        free_memory(machine(tmp_path / "b", version + path, **limited(top, none, 3 * GB)))
        == AVAILABLE
    )
    assert free_memory(machine(tmp_path / "c", version + path, **limited(top, GB, 3 * GB))) == 0


@pytest.mark.parametrize("version", ["0::", "4:memory,hugetlb:"])
def test_every_group_around_the_process_counts(tmp_path: Path, version: str) -> None:
    top = "__memory" if "memory" in version else ""
    outer, inner = limited(f"{top}__user", 5 * GB, 2 * GB), limited(f"{top}__user__app", 9 * GB, GB)
    assert (
        free_memory(machine(tmp_path, f"9:cpu:/other\n{version}/user/app", **outer, **inner))
        == 3 * GB
    )


def test_a_system_without_meminfo_gives_half_of_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Mac knows how many pages there are, and not by SC_AVPHYS_PAGES how many are free."""
    pages = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 16384}

    def sysconf(name: str) -> int:
        if name not in pages:
            raise ValueError("unrecognized configuration name")
        return pages[name]

    monkeypatch.setattr(os, "sysconf", sysconf)
    assert free_memory(tmp_path) == 500 * 16384


def test_where_nothing_is_told_the_option_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sysconf")
    with pytest.raises(
        ValueError, match="doesn't tell how much memory it has; give cache_memory or n_blocks"
    ):
        free_memory(tmp_path)


def test_this_machine() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free_memory() < total
