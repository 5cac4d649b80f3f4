"""Where nva keeps files from one start to the next: the XDG cache folder, or what stands in for it.

The law: there is always an answer, and nobody else can write to it. Containers run as a user
without a home (OpenShift gives a random user id), and then a folder in the temporary one serves."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """The folder for nva's own files; it may not exist yet, and may not be writable."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # the XDG specification: relative paths are ignored
        return Path(named) / "nva"
    home = os.path.expanduser("~")  # "~" itself where the user is unknown
    return Path(home, ".cache", "nva") if os.path.isabs(home) else temporary_folder()


def temporary_folder() -> Path:
    """This user's folder in the temporary one: the same at each start until it is cleaned up.

    Raises OSError where there is none, or where the name is taken by someone else's."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir(), f"nva-{user}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    others_write = stat.S_IMODE(found.st_mode) & (stat.S_IWGRP | stat.S_IWOTH)
    is_own = stat.S_ISDIR(found.st_mode) and (not hasattr(os, "getuid") or found.st_uid == user)
    if not is_own or others_write:
        raise PermissionError(f"{folder} belongs to someone else, or others may write to it")
    return folder
