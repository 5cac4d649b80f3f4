"""nva: a functional LLM inference engine for Huawei Ascend NPUs, with CPU and GPU paths.

    import nva
    for answer in nva.run(["Hello", "The capital of France is"], nva.SamplingParams(max_tokens=32)):
        print(answer.text)

Public names are imported when they are first asked for (PEP 562), so that `nva --help` and `nva
doctor` need no torch. Read run.py first; docs/tour.md walks one request through every file.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from nva.host.forks import survive_forks
from nva.host.openmp import set_up_openmp

if TYPE_CHECKING:  # for type checkers and editors; a test holds it equal to _HOMES
    from nva.engine import Engine, step
    from nva.loading.load import load
    from nva.loading.options import Options
    from nva.loop import Sampler, Steps
    from nva.models.registry import register
    from nva.run import astream, generate, run, stream
    from nva.state.engine import EngineState
    from nva.state.errors import DeviceError, InvariantError
    from nva.state.limits import Limits
    from nva.state.policy import Policy
    from nva.state.request import Request, SamplingParams
    from nva.text.answers import Completion, Sample, TextDelta

__version__ = "0.1.0"

set_up_openmp()
survive_forks()

__all__ = [
    "Completion",
    "DeviceError",
    "Engine",
    "EngineState",
    "InvariantError",
    "Limits",
    "Options",
    "Policy",
    "Request",
    "Sample",
    "Sampler",
    "SamplingParams",
    "Steps",
    "TextDelta",
    "__version__",
    "astream",
    "generate",
    "load",
    "register",
    "run",
    "step",
    "stream",
]

_HOMES = {
    "Completion": "nva.text.answers",
    "DeviceError": "nva.state.errors",
    "Engine": "nva.engine",
    "EngineState": "nva.state.engine",
    "InvariantError": "nva.state.errors",
    "Limits": "nva.state.limits",
    "Options": "nva.loading.options",
    "Policy": "nva.state.policy",
    "Request": "nva.state.request",
    "Sample": "nva.text.answers",
    "Sampler": "nva.loop",
    "SamplingParams": "nva.state.request",
    "Steps": "nva.loop",
    "TextDelta": "nva.text.answers",
    "astream": "nva.run",
    "generate": "nva.run",
    "load": "nva.loading.load",
    "register": "nva.models.registry",
    "run": "nva.run",
    "step": "nva.engine",
    "stream": "nva.run",
}
"""Public name -> the module that defines it."""


if not TYPE_CHECKING:  # to a type checker, a name that is not listed above is a mistake

    def __getattr__(name: str) -> Any:
        """A public name, or a module of the package, imported now and kept."""
        if name in _HOMES:
            found = getattr(importlib.import_module(_HOMES[name]), name)
            globals()[name] = found
            return found
        module = f"{__name__}.{name}"
        if not name.startswith("_"):
            try:
                return importlib.import_module(module)
            except ModuleNotFoundError as error:
                if error.name != module:
                    raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(types.ModuleType):
    """The class of this module. Importing a submodule sets it as an attribute of its package, which
    would hide the function `nva.run` behind the module nva.run: public names win."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
