"""Tests of the NPU path, run by `make test-npu` in an environment of their own. Elsewhere this
folder is inert."""

from __future__ import annotations

import importlib.util
import warnings

HAS_NPU_WHEEL = importlib.util.find_spec("torch_npu") is not None
collect_ignore_glob = [] if HAS_NPU_WHEEL else ["test_*.py"]

if HAS_NPU_WHEEL:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # what the wheel's own imports warn of; in the tests a warning is an error
        import torch_npu  # noqa: F401
        import torchair  # noqa: F401
