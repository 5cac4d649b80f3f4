"""How nva says that something is wrong: bad input is a ValueError, raised before any state
changes."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping


class InvariantError(AssertionError):
    """A law of the engine is broken: a fault of nva or of a custom step, never of the user's
    input."""

    @classmethod
    def unequal(cls, law: str, left: object, right: object) -> InvariantError:
        """The law in words, and both sides of the equation that doesn't hold."""
        return cls(f"{law}: {left} != {right}")


class DeviceError(RuntimeError):
    """A device, or somebody's own kernels, can't compute what the reference does."""


def check_names(
    owner: str, given: Collection[str], known: Collection[str], elsewhere: Mapping[str, str]
) -> None:
    """Raise ValueError for a name that `owner` doesn't have, suggesting ours: by `elsewhere`, or
    the nearest."""
    for name in given:
        if name not in known:
            near = elsewhere.get(name) or next(iter(difflib.get_close_matches(name, known)), None)
            hint = f"did you mean {near}?" if near else f"known are {', '.join(known)}"
            raise ValueError(f"{owner} has no {name!r}; {hint}")
