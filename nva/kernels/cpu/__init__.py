"""The kernels of a CPU: compiled on first use by the machine's own C++ compiler, or the reference
where there is none.

The law: what serves is said: where nothing can be compiled, a line on stderr tells what is missing
and what it costs. Read next: operators.py, the functions; attention.cpp and matmul.h, what they
compute; build.py and library.py, how they are built and kept."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

from nva.host.messages import say
from nva.kernels import Device, refuse_graph
from nva.kernels.cpu.build import BuildError
from nva.kernels.cpu.device import PLAIN


def is_here() -> bool:
    """Always."""
    return True


def choose(name: str, heads: Any, graph: str) -> Device:
    """The CPU. Raises ValueError for a graph mode."""
    refuse_graph("cpu", graph)
    return _compiled()


@functools.cache
def _compiled() -> Device:
    """The CPU with its compiled kernels, or the reference's if they can't be compiled here; says so
    once."""
    try:
        return importlib.import_module("nva.kernels.cpu.operators").COMPILED
    except BuildError as error:
        say(f"{error}; plain torch serves instead, several times slower", logging.WARNING)
        return PLAIN
