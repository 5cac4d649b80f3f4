"""What nva tells its user when it decides something.

The law: each is one line, told once, by the logger "nva". An application that gives this logger or
the root logger a handler has them there; in all others they go to stderr. To silence them:
`logging.getLogger("nva").setLevel(logging.WARNING)`.
"""

from __future__ import annotations

import logging
import sys

LOGGER = logging.getLogger("nva")
LOGGER.addHandler(logging.NullHandler())  # else logging would print warnings a second time


def say(text: str, level: int = logging.INFO) -> None:
    """Tell the user, at a level of logging's: INFO for what was decided, WARNING for what costs."""
    if is_configured():
        LOGGER.log(level, text)
    elif level >= max(LOGGER.level or logging.INFO, logging.root.manager.disable + 1):
        print(f"nva: {text}", file=sys.stderr)


def is_configured() -> bool:
    """Whether the application has said where messages go."""
    own = [each for each in LOGGER.handlers if not isinstance(each, logging.NullHandler)]
    return bool(own) or (LOGGER.propagate and bool(logging.root.handlers))
