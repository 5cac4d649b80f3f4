"""The decoder traces: torch.compile takes it whole, as one graph, over the reference kernels."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch

from nva.kernels import Compute, reference
from tests.checkpoints import CASES, MAX_MODEL_LEN
from tests.models.parity import TOLERANCE, deviation, mutated, subject


@pytest.mark.parametrize("name", ["qwen2-yarn", "qwen3-window", "gemma3", "qwen2_moe-fused"])
def test_decoder_traces_without_a_break(name: str, tmp_path: Path) -> None:
    traces = []

    def compiled(compute: Compute) -> Compute:
        traces.append(compute)
        return torch.compile(compute, fullgraph=True, dynamic=False, backend="eager")

    torch.compiler.reset()
    traced = attrs.evolve(subject(CASES[name], tmp_path), kernels=mutated(reference, compiled=compiled))
    assert deviation(traced, MAX_MODEL_LEN) < TOLERANCE
    assert len(traces) == 1
