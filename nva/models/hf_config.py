"""A Hugging Face config.json, read setting by setting: each value is checked as it is read, and
what was read is noted.

The law: a value that nva can't use is a ValueError that names the setting, what it is and what it
may be. null counts as absent. A config is read as data: no code of the checkpoint or of
transformers runs. Read next: read_spec.py for what the families have in common; unread.py for the
settings that nobody has read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import attrs

from nva.state.checks import LARGEST_INT32, is_number, is_whole

REQUIRED: Any = object()
"""The default of a setting that has none."""


@attrs.frozen(eq=False)
class Config:
    """A config.json, or a config inside it, and which of its settings were read.

    It can't be copied like a dict, since a copy would read everything: `config | {...}` has other
    values instead."""

    settings: Mapping[str, Any]
    path: str = attrs.field(default="", kw_only=True)  # of an inner one, such as "text_config."
    known: set[str] = attrs.field(factory=set, kw_only=True)  # names that were read
    # Name -> values that say what nva computes anyway; check_all_read() refuses any other.
    agreed: dict[str, tuple[Any, ...]] = attrs.field(factory=dict, kw_only=True)
    parts: list[Config] = attrs.field(factory=list, kw_only=True)  # configs inside this one

    def __getitem__(self, name: str) -> Any:
        """A setting without a default. Raises ValueError if the config doesn't have it."""
        found = self.get(name)
        if found is None:
            raise ValueError(
                f"config.json has no '{self.path}{name}', which {architecture(self)} needs"
            )
        return found

    def get(self, name: str, default: Any = None) -> Any:
        """A setting as it stands, or the default where the config hasn't it."""
        self.known.add(name)
        found = self.settings.get(name)
        return default if found is None else found

    def __contains__(self, name: str) -> bool:
        """Whether the config says anything of it, be it null; this doesn't count as reading."""
        return name in self.settings

    def __or__(self, settings: Mapping[str, Any]) -> Config:
        """The config with these settings, which count as read: whoever gives them has decided."""
        self.known.update(settings)
        return attrs.evolve(self, settings={**self.settings, **settings})

    def size(
        self, name: str, default: Any = REQUIRED, at_least: int = 1, at_most: int = LARGEST_INT32
    ) -> int:
        """A whole number in [at_least, at_most]; 64.0 is taken for 64."""
        value: Any = self._given(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not is_whole(value) or value < at_least:
            self.refuse(name, f"a whole number of at least {at_least}")
        if value > at_most:
            self.refuse(name, f"a whole number of at most {at_most}")
        return value

    def size_or_null(self, name: str) -> int | None:
        """A whole number of at least 1, or None where the config says null, false or 0; it must say
        something."""
        if name not in self:
            return self[name]  # raises
        value = self.get(name, False)
        is_zero = is_number(value) and value == 0
        return None if is_zero or value is False else self.size(name)

    def number(self, name: str, default: Any = REQUIRED) -> Any:
        """A finite number above 0; the default may be None."""
        value = self._given(name, default)
        if value is None:
            return None
        if not is_number(value) or not math.isfinite(value) or value <= 0:
            self.refuse(name, "a finite number above 0")
        return float(value)

    def flag(self, name: str, default: Any = False) -> bool:
        """true or false; 1 and 0 are taken for them."""
        value = self._given(name, default)
        if not isinstance(value, bool) and not (is_whole(value) and value in (0, 1)):
            self.refuse(name, "true or false")
        return bool(value)

    def choice(self, name: str, default: str, known: Sequence[str]) -> str:
        """One of some words."""
        value = self._given(name, default)
        if not isinstance(value, str) or value not in known:
            self.refuse(name, f"one of {', '.join(known)}")
        return value

    def sizes(
        self, name: str, default: Any = REQUIRED, at_most: int = LARGEST_INT32
    ) -> tuple[int, ...]:
        """A list of whole numbers in [0, at_most]."""
        value = self._given(name, default)
        if not isinstance(value, (list, tuple)) or not all(map(is_whole, value)):
            self.refuse(name, "a list of whole numbers")
        if any(not 0 <= each <= at_most for each in value):
            self.refuse(name, f"a list of whole numbers from 0 to {at_most}")
        return tuple(value)

    def names(self, name: str, default: Any = REQUIRED) -> tuple[str, ...]:
        """A list of words."""
        value = self._given(name, default)
        is_list = isinstance(value, (list, tuple))
        if not is_list or not all(isinstance(each, str) for each in value):
            self.refuse(name, "a list of names")
        return tuple(value)

    def group(self, name: str) -> dict[str, Any]:
        """The settings of an object inside the config, {} if there is none."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            self.refuse(name, "an object with settings")
        return dict(value)

    def part(self, name: str) -> Config:
        """A config inside this one, whose settings are watched likewise."""
        if not isinstance(self[name], Mapping):
            self.refuse(name, "an object with settings")
        inner = Config(self[name], path=f"{self.path}{name}.")
        self.parts.append(inner)
        return inner

    def refuse(self, name: str, allowed: str) -> NoReturn:
        """Raise the ValueError for a setting whose value nva can't use."""
        found = self.settings.get(name)
        raise ValueError(f"config.json has {self.path}{name} = {found!r:.80}; it must be {allowed}")

    def pass_over(self, *names: str) -> None:
        """Settings that mean nothing to this family, whatever their value."""
        self.known.update(names)

    def agree(self, **values: tuple[Any, ...]) -> None:
        """Settings that the family needn't read, since it always computes what these values ask
        for. Any other value is refused."""
        self.agreed.update(values)

    def _given(self, name: str, default: Any) -> Any:
        return self[name] if default is REQUIRED else self.get(name, default)


def architecture(config: Config) -> str:
    """What the model calls itself, for messages."""
    names = config.get("architectures")
    return ", ".join(map(str, names)) if isinstance(names, (list, tuple)) else "this model"
