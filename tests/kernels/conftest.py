"""What the tests of the CPU's kernels share: they run on one thread and on two."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture(params=[1, 2])
def n_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """What nva has told its user in this test so far."""
    caplog.set_level(logging.INFO, "nva")
    return lambda: caplog.text
