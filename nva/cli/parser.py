"""A parser of the command line that helps with what it doesn't know.

The law: a wrong flag or command is told in two lines, the command's own usage and what was likely
meant. Read next: main.py, which says what there is.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """As argparse's, but an unknown flag is its own command's error, with a suggestion.

    `other_names` are what other tools call a flag, such as {"max_new_tokens": "max_tokens"}.
    """

    def __init__(self, *args: Any, other_names: Mapping[str, str] | None = None, **options: Any):
        super().__init__(*args, allow_abbrev=False, **options)
        self.other_names = other_names or {}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse here what argparse would hand up to the parser above."""
        found, unknown = super().parse_known_args(args, namespace)
        flags = [text for text in unknown if text.startswith("-")]
        if flags:
            self.error(self._unknown(flags[0]))
        return found, unknown

    def _unknown(self, given: str) -> str:
        name = given.partition("=")[0]
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        near = suggestion(name, known, self.other_names)
        return f"there is no {name}" + (f"; did you mean {near}?" if near else "; see --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Suggest a command where one is mistyped."""
        is_command = isinstance(action, argparse._SubParsersAction)
        if is_command and value not in (action.choices or ()):
            near = difflib.get_close_matches(str(value), list(action.choices or ()), 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(action.choices)}"
            raise argparse.ArgumentError(None, f"there is no command {value}; {hint}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        """Two lines: the usage in short, and what is wrong."""
        self.exit(2, f"usage: {self.usage_line()}\n{self.prog}: {message}\n")

    def usage_line(self) -> str:
        """How the command is written, without the list of its flags."""
        return self.usage or f"{self.prog} [options]"


def suggestion(flag: str, known: Collection[str], other_names: Mapping[str, str]) -> str | None:
    """The flag that was likely meant: another tool's name for it, the nearest in spelling, or the
    one that begins like it."""
    plain = flag.lstrip("-").replace("-", "_").lower()
    if plain in other_names:
        meant = other_names[plain]
        name, _, note = meant.partition(" ")
        as_flag = "--" + name.replace("_", "-")
        return f"{as_flag} {note}".rstrip() if as_flag in known else meant
    dashed = "--" + plain.replace("_", "-")
    candidates: Sequence[str] = sorted(known)
    beginning = [name for name in candidates if name.startswith(dashed)]
    nearest = difflib.get_close_matches(dashed, candidates, 1, cutoff=0.6)
    return next(iter([*nearest, *beginning]), None)
