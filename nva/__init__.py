"""nva: a functional LLM inference engine for Huawei Ascend NPUs, with CPU and GPU paths.

    import nva
    for answer in nva.run(["Hello", "The capital of France is"], nva.SamplingParams(max_tokens=32)):
        print(answer.text)

Read run.py first; docs/tour.md walks one request through every file.
"""

import os
import sys

if sys.argv[1:2] == [
    "doctor"
]:  # it must run where torch_npu can't be loaded, which torch would do by itself
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

from nva.engine import Engine, step
from nva.loading.load import load
from nva.loading.options import Options
from nva.models.registry import register
from nva.run import generate, run, stream
from nva.state.engine import EngineState
from nva.state.errors import InvariantError
from nva.state.limits import Limits
from nva.state.policy import Policy
from nva.state.request import Request, SamplingParams
from nva.text.answers import Completion, Sample, TextDelta

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
