"""nva: a functional LLM inference engine for Huawei Ascend NPUs, with CPU and GPU paths.

    import nva
    for answer in nva.run(["Hello", "The capital of France is"], nva.SamplingParams(max_tokens=32)):
        print(answer.text)

Read run.py first; docs/tour.md walks one request through every file.
"""

import os
import sys

if sys.argv[1:2] == ["doctor"]:  # it must run where torch_npu can't be loaded, which torch would do by itself
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

from nva.answers import Completion, Sample, TextDelta
from nva.load import Engine, Options, load
from nva.models.registry import register
from nva.run import generate, run, step, stream
from nva.state.config import Limits
from nva.state.engine import EngineState
from nva.state.errors import InvariantError
from nva.state.policy import Policy
from nva.state.request import Request, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "Engine",
    "EngineState",
    "InvariantError",
    "Limits",
    "Options",
    "Policy",
    "Request",
    "Sample",
    "SamplingParams",
    "TextDelta",
    "__version__",
    "generate",
    "load",
    "register",
    "run",
    "step",
    "stream",
]
