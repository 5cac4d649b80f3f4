"""Logits at every position equal transformers', for every family, rope, window and chunk size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpoints import CASES, MAX_MODEL_LEN
from tests.models.parity import TOLERANCE, Subject, deviation, subject


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    yield subject(CASES[request.param], tmp_path_factory.mktemp(request.param))


def test_whole_prefill(case: Subject) -> None:
    assert deviation(case, MAX_MODEL_LEN) < TOLERANCE


@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_decode_and_some_chunk_sizes(case: Subject, chunk: int) -> None:
    assert deviation(case, chunk) < TOLERANCE


@pytest.mark.slow
def test_every_chunk_size(case: Subject) -> None:
    deviations = {chunk: deviation(case, chunk) for chunk in range(1, MAX_MODEL_LEN)}
    assert max(deviations.values()) < TOLERANCE, deviations
