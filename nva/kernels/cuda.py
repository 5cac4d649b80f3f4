"""How a GPU is used: the reference kernels, operator by operator; a place to check results.

The law: what differs from a CPU is where tensors live and how they get there. Read next:
reference.py, which computes."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from nva.kernels import Device, refuse_graph
from nva.kernels.cpu.device import PLAIN


def empty_cache(shape: tuple[int, ...], dtype: torch.dtype, where: torch.device) -> Tensor:
    """Zeros in the GPU's memory."""
    return torch.zeros(shape, dtype=dtype, device=where)


def cache_memory(where: torch.device) -> int:
    """A third of what is free: the machine may have other uses for the rest."""
    return torch.cuda.mem_get_info(where)[0] // 3


GPU = attrs.evolve(
    PLAIN,
    name="cuda",
    where=torch.device("cuda"),
    empty_cache=empty_cache,
    cache_memory=cache_memory,
    pins_memory=True,
    is_host=False,
)


def is_here() -> bool:
    """Whether torch sees a GPU."""
    return torch.cuda.is_available()


def choose(name: str, heads: Any, graph: str) -> Device:
    """The GPU of this name. Raises ValueError where it isn't here, and for a graph mode."""
    refuse_graph("cuda", graph)
    n_gpus = torch.cuda.device_count() if is_here() else 0
    index = int(name.partition(":")[2] or 0)
    if index >= n_gpus:
        raise ValueError(
            f"device is {name!r}, but torch {torch.__version__} finds {n_gpus} GPUs here; give "
            "another, or cpu"
        )
    return attrs.evolve(GPU, where=torch.device(name))
