"""Logits at every position equal transformers', for every family, rope, window and chunk size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from nva.kernels import reference
from nva.kernels.cpu import operators
from tests.checkpoints import CASES, MAX_MODEL_LEN
from tests.models.parity import TOLERANCE, Subject, deviation, subject


def case_id(pair: Any) -> str:
    return f"{pair[0]}-{pair[1].__name__.rpartition('.')[2]}"


@pytest.fixture(scope="module", params=itertools.product(CASES, (reference, operators)), ids=case_id)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    name, kernels = request.param
    yield subject(CASES[name], tmp_path_factory.mktemp(name), kernels)


def test_whole_prefill(case: Subject) -> None:
    assert deviation(case, MAX_MODEL_LEN) < TOLERANCE


@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_decode_and_some_chunk_sizes(case: Subject, chunk: int) -> None:
    assert deviation(case, chunk) < TOLERANCE


@pytest.mark.slow
def test_every_chunk_size(case: Subject) -> None:
    deviations = {chunk: deviation(case, chunk) for chunk in range(1, MAX_MODEL_LEN)}
    assert max(deviations.values()) < TOLERANCE, deviations
