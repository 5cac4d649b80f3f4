"""The seam between nva and an NPU: where tensors live, and how memory is asked.

The law: everything that only a device can answer is here, so that the tests, which have none,
replace two functions and nothing else of nva. (How a graph is captured, torchair and npugraph_ex
decide; the tests replace their last step.) Read next: docs/npu.md, which lists what therefore never
ran without hardware."""

from __future__ import annotations

import torch
import torch_npu


def place(name: str) -> torch.device:
    """The device that tensors are put on, chosen and prepared for this process."""
    device = torch.device(name)
    torch.npu.set_device(device)
    # Operators come compiled with CANN; compiling them again for every new shape would take
    # minutes.
    torch.npu.set_compile_mode(jit_compile=False)
    # Private weight layouts are not used here, and "aclop" operators that convert them can't be
    # captured in a graph.
    torch_npu.npu.config.allow_internal_format = False
    return device


def free_memory(device: torch.device) -> int:
    """Bytes of device memory that nobody holds."""
    return torch.npu.mem_get_info(device)[0]
