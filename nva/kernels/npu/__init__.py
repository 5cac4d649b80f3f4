"""The backend for Huawei Ascend NPUs (910B and 910C), the only place that names torch_npu.

The law: importing this package imports no torch_npu, so that support.py can judge an installation
that lacks it. Read next: operators.py for the calls, devices.py for what the graph modes differ in,
support.py for which of them an installation has."""

from __future__ import annotations

import importlib
import importlib.util

import attrs

from nva.host.messages import say
from nva.kernels import Device
from nva.kernels.npu.support import Heads, Installation, choose_mode, parse_version


def is_here() -> bool:
    """Whether torch sees an NPU: it imports torch_npu by itself where that is installed."""
    import torch

    return hasattr(torch, "npu") and torch.npu.is_available()


def choose(name: str, heads: Heads, graph: str) -> Device:
    """The NPU of this name, made ready, in the graph mode that is asked for, or in the best one
    that works here, which is said on stderr.

    Raises ValueError where torch_npu is missing, and for a mode that won't work.
    """
    if importlib.util.find_spec("torch_npu") is None:
        raise ValueError(
            "device 'npu' needs torch_npu: pip install 'nva[npu]', then run `nva doctor`"
        )
    mode, reason = choose_mode(graph, probe(), heads)
    if graph == "auto":
        say(f"NPU graph mode {mode} ({reason})")
    seam = importlib.import_module("nva.kernels.npu.device")
    return attrs.evolve(_device(mode), where=seam.place(name))


def _device(mode: str) -> Device:
    """The device in this mode; others are not imported, as their compilers may be missing."""
    module = importlib.import_module(_HOMES[mode])
    return getattr(module, mode.upper())


_HOMES = {
    "eager": "nva.kernels.npu.devices",
    "aclgraph": "nva.kernels.npu.devices",
    "ge": "nva.kernels.npu.ge",
}


def probe() -> Installation:
    """What this process's torch_npu has. Features are looked for; versions only decide what can't
    be looked at."""
    import torch
    import torch_npu

    return Installation(
        cann=parse_version(torch_npu.npu.utils.get_cann_version()),
        has_attention=hasattr(torch.ops.npu, "npu_fused_infer_attention_score_v2"),
        has_torchair=importlib.util.find_spec("torch_npu.dynamo.torchair") is not None,
        has_npugraph_ex=importlib.util.find_spec("torch_npu.dynamo.npugraph_ex") is not None,
    )
