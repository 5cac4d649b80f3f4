"""What nva tells its user when it decides something.

The law: one line each time, on the logger "nva" and on stderr; an application that gives this
logger a handler of its own has it there alone."""

from __future__ import annotations

import logging
import sys

LOGGER = logging.getLogger("nva")
LOGGER.addHandler(logging.NullHandler())  # else logging would print warnings a second time


def say(text: str, level: int = logging.INFO) -> None:
    """Tell the user."""
    LOGGER.log(level, text)
    if all(isinstance(handler, logging.NullHandler) for handler in LOGGER.handlers):
        print(f"nva: {text}", file=sys.stderr)
