"""A dict as a value: the prefix index, the free queue, the ids that wait.

The law: a version that a state has shown never changes. Read next: blocks.py and waiting.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


_NOT_YET: Any = {}
"""What a version holds until it is handed its dict."""


class Lookup(Generic[K, V]):
    """A persistent dict by shallow binding (Baker 1978). One dict serves all versions: the newest
    holds it, every older one holds what must be undone to get there.

        oldest  --undo-->  older  --undo-->  newest {dict}

    So the newest version costs what a dict costs. Any other one can still be read or changed: it
    takes the dict over, at the price of the changes between. Exactly one version has the dict at
    any moment, wherever an interrupt falls; what it has still to change is noted beside."""

    __slots__ = ("_due", "_items", "_newer", "_undo")

    def __init__(self, items: dict[K, V] | None = None) -> None:
        self._items: dict[K, V] | None = items if items is not None else {}
        self._newer: Lookup[K, V] | None = None
        self._undo: Mapping[K, V | None] = {}
        self._due: Mapping[K, V | None] = {}

    def get(self, key: K) -> V | None:
        """The value under the key, None if there is none."""
        return self._taken_over().get(key)

    def __getitem__(self, key: K) -> V:
        return self._taken_over()[key]

    def among(self, keys: Iterable[K]) -> dict[K, V]:
        """What is there of these keys."""
        items = self._taken_over()
        return {key: items[key] for key in keys if key in items}

    def follow(self: Lookup[K, K], start: K, n: int) -> list[K]:
        """n values, each found under the one before, the first under `start`: a linked list."""
        items = self._taken_over()
        found: list[K] = []
        for _ in range(n):
            start = items[start]
            found.append(start)
        return found

    def as_dict(self) -> dict[K, V]:
        """All of it, copied."""
        return dict(self._taken_over())

    def __contains__(self, key: K) -> bool:
        return key in self._taken_over()

    def __len__(self) -> int:
        return len(self._taken_over())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as what it holds, not as the chain of its versions."""
        return Lookup, (self.as_dict(),)

    def updated(self, changes: Mapping[K, V | None]) -> Lookup[K, V]:
        """The version with these values set; None removes a key."""
        newer = Lookup[K, V](_NOT_YET)
        self._hand_over(newer, changes)
        return newer

    def _hand_over(self, other: Lookup[K, V], changes: Mapping[K, V | None]) -> None:
        """Make the dict the other version's, which differs from this one by the changes."""
        items = self._taken_over()
        self._undo = {key: items.get(key) for key in changes}
        self._newer = other
        other._due = changes
        # One statement without a call: no interrupt comes in between.
        self._items, other._items = None, items
        other._taken_over()

    def _taken_over(self) -> dict[K, V]:
        """The dict with this version's content: taken from the newest version, through all
        between."""
        items = self._items
        if items is None:
            items = self._walked()
        if self._due:
            # An interrupt in the midst has it done again, which makes no difference.
            items.update(self._due)  # pyright: ignore[reportArgumentType, reportCallIssue]
            if None in self._due.values():
                for key in [key for key, value in self._due.items() if value is None]:
                    items.pop(key, None)
            self._due = {}
        return items

    def _walked(self) -> dict[K, V]:
        path: list[Lookup[K, V]] = []
        version: Lookup[K, V] = self
        while version._items is None:
            path.append(version)
            assert version._newer is not None
            version = version._newer
        for older in reversed(path):
            version._hand_over(older, older._undo)
            version = older
        assert self._items is not None
        return self._items
