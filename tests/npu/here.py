"""The NPU's devices with their tensors on the CPU, where the operators are emulated."""

from __future__ import annotations

import attrs
import torch

from nva.kernels.npu import devices, ge

EAGER, GE, ACLGRAPH = (
    attrs.evolve(device, where=torch.device("cpu"))
    for device in (devices.EAGER, ge.GE, devices.ACLGRAPH)
)
