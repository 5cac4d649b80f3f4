"""The decoder traces: torch.compile takes it whole, as one graph, over the reference kernels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from nva.kernels import Compute
from nva.kernels.cpu.device import PLAIN
from nva.models import decoder
from tests.checkpoints import CASES, MAX_MODEL_LEN
from tests.devices import mutated
from tests.models.parity import TOLERANCE, deviation, subject


def test_the_embedding_scale_is_rounded_as_gemmas(tmp_path: Path) -> None:
    """The root of 48 is 6.928, in bfloat16 6.9375."""
    spec = subject(CASES["gemma3"], tmp_path).spec
    theirs = Gemma3TextScaledWordEmbedding(97, 48, padding_idx=0, embed_scale=48**0.5).bfloat16()
    torch.nn.init.normal_(theirs.weight)
    with torch.no_grad():
        inputs = SimpleNamespace(token_ids=torch.arange(97), features=None)
        assert torch.equal(
            decoder._embedding(spec, theirs.weight, inputs), theirs(torch.arange(97))
        )


@pytest.mark.parametrize("name", ["qwen2-yarn", "qwen3-window", "gemma3", "qwen2_moe-fused"])
def test_decoder_traces_without_a_break(name: str, tmp_path: Path) -> None:
    traces = []

    def compiled(compute: Compute) -> Compute:
        traces.append(compute)
        return torch.compile(compute, fullgraph=True, dynamic=False, backend="eager")

    torch.compiler.reset()
    traced = attrs.evolve(subject(CASES[name], tmp_path), device=mutated(PLAIN, compiled=compiled))
    assert deviation(traced, MAX_MODEL_LEN) < TOLERANCE
    assert len(traces) == 1
