"""Logits at every position equal transformers', for every family, rope, window and chunk size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from nva.forward import make_forward
from nva.kernels.cpu.device import PLAIN
from nva.kernels.cpu.operators import COMPILED
from nva.models import load_checkpoint
from nva.state.plan import Batch
from tests.checkpoints import CASES, LLAMA3, MAX_MODEL_LEN, build
from tests.models.parity import (
    LIMITS,
    TOLERANCE,
    Subject,
    batches,
    deviation,
    make_batch,
    poisoned_kv,
    subject,
)


def case_id(pair: Any) -> str:
    return f"{pair[0]}-{'plain' if pair[1] is PLAIN else 'compiled'}"


@pytest.fixture(scope="module", params=itertools.product(CASES, (PLAIN, COMPILED)), ids=case_id)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    name, device = request.param
    yield subject(CASES[name], tmp_path_factory.mktemp(name), device)


def test_whole_prefill(case: Subject) -> None:
    assert deviation(case, MAX_MODEL_LEN) < TOLERANCE


@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_decode_and_some_chunk_sizes(case: Subject, chunk: int) -> None:
    assert deviation(case, chunk) < TOLERANCE


@pytest.mark.slow
def test_every_chunk_size(case: Subject) -> None:
    deviations = {chunk: deviation(case, chunk) for chunk in range(1, MAX_MODEL_LEN)}
    assert max(deviations.values()) < TOLERANCE, deviations


def test_llama_3_at_positions_beyond_100_000(tmp_path: Path) -> None:
    """The rows of a hand-made batch stand where no quick test can prefill to; their caches hold
    nothing before."""
    far = 130_000
    stretched = {
        **LLAMA3,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 5e5,
    }
    case = attrs.evolve(
        CASES["llama-llama3"], rope=stretched, config={"max_position_embeddings": 131_072}
    )
    model = build(case, tmp_path)
    checkpoint, params = load_checkpoint(tmp_path)
    rows = [np.random.default_rng(0).integers(0, 97, 30)]
    with torch.inference_mode():
        ids = torch.tensor(rows[0])[None]
        expected = model(ids, position_ids=far + torch.arange(30)[None], use_cache=False).logits[0]
    forward = make_forward(checkpoint.spec, attrs.evolve(LIMITS, max_model_len=131_072), PLAIN)
    kv, found = poisoned_kv(checkpoint.spec), []
    for batch, _ in batches(rows, chunk=7):
        arrays = {
            name: getattr(batch, name)
            for name in attrs.fields_dict(Batch)
            if name not in ("buffer", "images")
        }
        logits, kv = forward(
            params, kv, make_batch(**{**arrays, "positions": batch.positions + far})
        )
        found.append(logits[: batch.n_logits])
    assert (torch.cat(found) - expected).abs().max() < TOLERANCE * expected.std()
