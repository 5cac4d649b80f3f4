"""The CPU's experts against what they mean and against the reference, over shapes that no vector or
tile divides."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from nva.kernels import reference
from nva.kernels.cpu import operators
from tests.kernels.cases import MoeCase, dense_moe, moe_cases

pytestmark = pytest.mark.usefixtures("n_threads")
FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def computed(case: MoeCase, kernels: Any = operators) -> Tensor:
    experts = kernels.pack_linear(case.gate_up), kernels.pack_linear(case.down)
    return kernels.moe(
        case.x, case.logits, *experts, case.n_active, case.normalize, case.is_padding
    )


def drawn(
    dtype: torch.dtype, n_tokens: int, hidden: int, inner: int, n_experts: int, n_active: int
) -> MoeCase:
    """Tokens without padding, seeded by the sizes."""
    generator = torch.Generator().manual_seed(n_tokens + hidden + inner + n_experts)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return MoeCase(
        x=normal(n_tokens, hidden),
        logits=normal(n_tokens, n_experts),
        gate_up=normal(n_experts, 2 * inner, hidden) / hidden**0.5,
        down=normal(n_experts, hidden, inner) / inner**0.5,
        n_active=n_active,
        normalize=True,
        is_padding=torch.zeros(n_tokens, dtype=torch.bool),
    )


@settings(max_examples=100, deadline=None)
@given(case=moe_cases(most_experts=70, largest=90))
def test_experts_are_a_weighted_sum_over_those_chosen(case: MoeCase) -> None:
    """Some experts get no token, some all of them; padding, which is NaN, changes nothing."""
    real = ~case.is_padding
    torch.testing.assert_close(
        computed(case).double()[real], dense_moe(case)[real], atol=2e-5, rtol=2e-5
    )


@settings(max_examples=60, deadline=None)
@given(case=moe_cases(dtype=torch.bfloat16, most_experts=70, largest=90))
def test_experts_in_bfloat16(case: MoeCase) -> None:
    out, expected, size = (
        x[~case.is_padding]
        for x in (computed(case), dense_moe(case), dense_moe(case, is_size=True))
    )
    assert out.dtype == torch.bfloat16
    assert ((out.double() - expected).abs() <= 2**-6 * size + 2**-8).all()


@pytest.mark.parametrize(("hidden", "inner"), [(2048, 37), (37, 2048)])
def test_experts_whose_rows_come_in_many_blocks(hidden: int, inner: int) -> None:
    case = drawn(torch.float32, 190, hidden, inner, n_experts=3, n_active=2)
    torch.testing.assert_close(computed(case), computed(case, reference), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("n_experts", "n_active"), [(7, 2), (30, 8), (30, 30), (130, 2)])
def test_of_equally_likely_experts_those_of_the_reference_are_chosen(
    n_experts: int, n_active: int
) -> None:
    case = drawn(torch.float32, 60, 5, 6, n_experts, n_active)
    case = attrs.evolve(case, logits=(case.logits * 2).round() / 2)
    torch.testing.assert_close(computed(case), computed(case, reference), atol=2e-5, rtol=2e-5)


@FLOATS
def test_a_token_has_the_same_bits_in_every_batch(dtype: torch.dtype, n_threads: int) -> None:
    """And on any number of threads, and whatever is padding beside it."""
    case = drawn(dtype, 300, 130, 70, n_experts=9, n_active=2)
    whole = computed(case)
    torch.set_num_threads(3 - n_threads)
    for start, end in ((0, 300), (0, 1), (7, 9), (20, 25), (31, 47), (60, 160), (299, 300)):
        is_padding = torch.arange(end - start) % 5 == 4
        part = attrs.evolve(
            case, x=case.x[start:end], logits=case.logits[start:end], is_padding=is_padding
        )
        assert torch.equal(computed(part)[~is_padding], whole[start:end][~is_padding])


def test_not_a_number_stays_with_its_token() -> None:
    """Be it in what is computed or in what routes it."""
    case = drawn(torch.float32, 6, 40, 20, n_experts=4, n_active=2)
    expected = computed(case)
    case.x[1], case.logits[3, 2] = torch.nan, torch.nan
    found = computed(case)
    assert found[[1, 3]].isnan().all()
    assert torch.equal(found[[0, 2, 4, 5]], expected[[0, 2, 4, 5]])


def test_padding_alone_computes_nothing() -> None:
    case = drawn(torch.bfloat16, 3, 7, 5, n_experts=4, n_active=2)
    assert computed(attrs.evolve(case, is_padding=~case.is_padding)).shape == (3, 7)


def test_experts_in_float16_go_to_the_reference() -> None:
    case = drawn(torch.float16, 5, 8, 6, n_experts=4, n_active=2)
    assert torch.equal(computed(case), computed(case, reference))
