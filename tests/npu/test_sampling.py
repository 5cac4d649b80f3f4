"""top_k and top_p by the NPU's operator keep the tokens that the sampler's own filter keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nva.kernels.npu import sampling
from nva.state.request import ROW_PARAMS
from nva.steps.filters import filter_gaps
from tests.npu import emulation

assert emulation.OPERATORS, "importing it gives the operators their CPU meaning"

N_TOKENS = 1500


def params_of(**columns):
    n = max(len(values) for values in columns.values())
    params = np.zeros(n, ROW_PARAMS)
    params["top_p"] = 1
    for name, values in columns.items():
        params[name] = values
    return params


def gaps_of(n):
    logits = torch.randn(n, N_TOKENS, generator=torch.Generator().manual_seed(n)) * 3
    return logits.amax(-1, keepdim=True) - logits


CASES = {
    "top_k": {"top_k": [1, 5, 1024]},
    "top_p": {"top_p": [0.1, 0.5, 0.999]},
    "both": {"top_k": [3, 50, 700], "top_p": [0.9, 0.3, 0.95]},
    "all three": {"top_k": [3, 50, 700], "top_p": [0.9, 0.3, 0.95], "min_p": [0.1, 0.001, 0.01]},
    "beyond the operator": {
        "top_k": [1025, 1499, N_TOKENS + 5],
        "top_p": [0.9, 1.0, 1.0],
        "min_p": [0, 0, 0.2],
    },
    "each its own way": {
        "top_k": [0, 7, 1200, 0, 0],
        "top_p": [0.4, 1, 0.8, 1, 1],
        "min_p": [0, 0, 0, 0.3, 0],
    },
}


@pytest.mark.parametrize("columns", CASES.values(), ids=CASES)
def test_the_same_tokens_are_kept(columns):
    params = params_of(**columns)
    expected, gaps = gaps_of(len(params)), gaps_of(len(params))
    filter_gaps(expected, params)
    sampling.make_filter_gaps(filter_gaps)(gaps, params)
    torch.testing.assert_close(gaps, expected)


def test_batch_mates_change_nothing():
    params = params_of(**CASES["each its own way"])
    together = gaps_of(len(params))
    rows = together.clone()
    sampling.make_filter_gaps(filter_gaps)(together, params)
    for i in range(len(params)):
        alone = rows[i : i + 1].clone()
        sampling.make_filter_gaps(filter_gaps)(alone, params[i : i + 1])
        assert torch.equal(alone[0], together[i])
