"""The kernels of a CPU: compiled on first use by the machine's own C++ compiler, or the reference
where there is none.

The law: what serves is said: where nothing can be compiled, a line on stderr tells what is missing
and what it costs. Read next: operators.py, the functions; attention.cpp and matmul.h, what they
compute; build.py and library.py, how they are built and kept."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import cast

from nva.host.messages import say
from nva.kernels import Kernels
from nva.kernels.cpu.build import BuildError


@functools.cache
def choose() -> Kernels:
    """The compiled kernels, or the reference if they can't be compiled here; says so once."""
    try:
        return cast(Kernels, importlib.import_module("nva.kernels.cpu.operators"))
    except BuildError as error:
        say(f"{error}; plain torch serves instead, several times slower", logging.WARNING)
        return cast(Kernels, importlib.import_module("nva.kernels.reference"))
