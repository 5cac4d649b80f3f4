"""A step that is replayed from a tape is the step that the function would compute, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor

from nva.forward import empty_kv, make_forward
from nva.kernels import Device
from nva.kernels.cpu import operators, tape
from nva.models import random_params
from nva.models.spec import ExpertSpec, ModelSpec
from nva.state.engine import empty, is_busy
from nva.state.limits import Limits
from nva.state.request import SamplingParams, request
from nva.steps.commit import commit
from nva.steps.pack import pack
from nva.steps.sample import sample
from nva.steps.schedule import schedule
from nva.steps.submit import submit
from tests.devices import mutated
from tests.test_forward import SPEC

DENSE = attrs.evolve(
    SPEC, hidden_size=32, head_dim=8, activation="gelu_tanh", embed_scale=3.0, logit_scale=0.5
)
EXPERTS = attrs.evolve(
    SPEC, experts=(None, ExpertSpec(n_experts=5, n_active=2, intermediate_size=12, normalize=True))
)
LIMITS = Limits(
    vocab_size=97, max_model_len=64, n_blocks=60, block_size=4, max_rows=6, max_batched_tokens=80
)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The tapes that are replayed."""
    found: list[Any] = []
    replay = tape.Tape.replay
    monkeypatch.setattr(
        tape.Tape, "replay", lambda self, arrays: found.append(self) or replay(self, arrays)
    )
    yield found


def weights(spec: ModelSpec, dtype: torch.dtype, seed: int = 0) -> Any:
    return random_params(
        spec, dtype, torch.Generator().manual_seed(seed), operators.KERNELS, std=0.3
    )


def steps(
    spec: ModelSpec, dtype: torch.dtype, enforce_eager: bool, device: Device = operators.COMPILED
) -> list[Tensor]:
    """The logits of all steps of a run: prompts of many lengths, forks that copy blocks, decoding
    to the end."""
    forward, kv = (
        make_forward(spec, LIMITS, device, enforce_eager=enforce_eager),
        empty_kv(spec, LIMITS, dtype),
    )
    random, params = np.random.default_rng(0), weights(spec, dtype)
    asked = [
        SamplingParams(temperature=0.7, seed=i, n=1 + i % 2, max_tokens=12, ignore_eos=True)
        for i in range(5)
    ]
    prompts = [random.integers(0, 97, 5 + 7 * i) for i in range(5)]
    state = submit(
        empty(LIMITS),
        [request(i, *pair) for i, pair in enumerate(zip(prompts, asked, strict=True))],
    )
    found = []
    while is_busy(state):
        state, plan = schedule(state)
        batch, draw = pack(state, plan)
        logits, kv = forward(params, kv, batch)
        found.append(logits)
        state, _ = commit(state, plan, sample(logits, draw))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "spec", [SPEC, DENSE, EXPERTS], ids=["plain", "operators of torch", "experts"]
)
def test_a_run_from_tapes_has_the_same_bits(
    spec: ModelSpec, dtype: torch.dtype, replays: list[Any]
) -> None:
    expected = steps(spec, dtype, enforce_eager=True)
    assert not replays
    found = steps(spec, dtype, enforce_eager=False)
    assert len(replays) > len(set(map(id, replays))) > 1, (
        "several tapes, some replayed more than once"
    )
    for one, other in zip(
        found, expected, strict=True
    ):  # compared at the end: no later step has overwritten a result
        assert torch.equal(one, other)


def small_step(compute: Callable[..., Tensor]) -> Any:
    """A function of one array on tapes, its parameters and caches being what is given."""
    run = tape.taped(
        compute,
        lambda inputs: (inputs.token_ids.numpy(),),
        lambda inputs, own: attrs.evolve(inputs, token_ids=torch.from_numpy(own[0])),
    )
    return lambda params, caches, values: run(params, caches, Step(token_ids=torch.tensor(values)))


@attrs.frozen(kw_only=True)
class Step:
    token_ids: Tensor
    rope_tables: None = None


def test_other_parameters_get_tapes_of_their_own(replays: list[Any]) -> None:
    run = small_step(lambda params, _, inputs: inputs.token_ids * params)
    for params in (torch.tensor(2), torch.tensor(3)):
        for _ in range(3):
            assert run(params, None, [1, 5]).tolist() == [int(params), 5 * int(params)]
    assert len(replays) == 2


def test_a_step_that_fails_while_it_is_recorded_is_forgotten() -> None:
    calls = []

    def compute(params: Tensor, caches: Any, inputs: Step) -> Tensor:
        calls.append(None)
        doubled = inputs.token_ids * 2
        if len(calls) == 2:
            raise OSError("out of memory")
        return doubled + params

    run, params = small_step(compute), torch.tensor(1)
    run(params, None, [1])
    with pytest.raises(OSError, match="out of memory"):
        run(params, None, [1])
    assert [run(params, None, [n]).tolist() for n in (3, 4, 5, 6)] == [[7], [9], [11], [13]]
    assert len(calls) == 5


def test_writes_in_place_and_several_results_are_on_the_tape(replays: list[Any]) -> None:
    def compute(params: Tensor, caches: Tensor, inputs: Step) -> Tensor:
        values, order = (inputs.token_ids * 10).sort(descending=True)
        caches.copy_(values[:1] + 1)
        return torch.cat([values, order, caches])

    run, params, caches = small_step(compute), torch.tensor(1), torch.zeros(1, dtype=torch.int64)
    found = [run(params, caches, [n, 7]).tolist() for n in (3, 9, 4, 8)]
    assert found == [[70, 30, 1, 0, 71], [90, 70, 0, 1, 91], [70, 40, 1, 0, 71], [80, 70, 0, 1, 81]]
    assert len(replays) == 2


def in_numpy(params: Tensor, caches: Any, inputs: Step) -> Tensor:
    return params * torch.from_numpy(inputs.token_ids.numpy() + 1)


def by_a_number(params: Tensor, caches: Any, inputs: Step) -> Tensor:
    return params * (inputs.token_ids + inputs.token_ids.min().item() ** 0)


@pytest.mark.parametrize(
    ("compute", "why"), [(in_numpy, "does more than call"), (by_a_number, "tells Python what")]
)
def test_what_no_tape_can_hold_is_computed(compute: Any, why: str, said: Callable[[], str]) -> None:
    run, params = small_step(compute), torch.tensor(2)
    assert [run(params, None, [n]).tolist() for n in range(5)] == [[2], [4], [6], [8], [10]]
    assert why in said()


def test_a_kernel_of_ones_own_is_computed_in_every_step(said: Callable[[], str]) -> None:
    """By numpy, which a tape doesn't see."""

    def silu_mul(x: Tensor) -> Tensor:
        gate, up = np.split(x.numpy(), 2, axis=1)
        return torch.from_numpy(gate / (1 + np.exp(-gate)) * up)

    own = steps(
        SPEC,
        torch.float32,
        enforce_eager=False,
        device=mutated(operators.COMPILED, silu_mul=silu_mul),
    )
    for one, other in zip(own, steps(SPEC, torch.float32, enforce_eager=True), strict=True):
        torch.testing.assert_close(one, other)
    assert "call by call" in said()


def test_tapes_that_were_not_used_for_long_are_dropped(
    monkeypatch: pytest.MonkeyPatch, replays: list[Any]
) -> None:
    monkeypatch.setattr(tape, "MOST_TAPES", 2)
    run = small_step(lambda params, _, inputs: inputs.token_ids * params)
    params = torch.tensor(2)
    for n in (1, 2, 3, 3, 3, 2, 1):
        run(params, None, [5] * n)
    assert len(replays) == 1, "of the shape that came three times in a row"
    for _ in range(2):
        run(params, None, [5])
    assert len(replays) == 2, "the first shape had been forgotten"


def test_the_arena_holds_one_step_whatever_the_number_of_tapes() -> None:
    arena = tape.Arena()

    def compute(n: int) -> Tensor:
        x = torch.ones(n, 64)
        for _ in range(20):
            x = x * 2
        return x

    for n in range(1, 65):
        result, made = tape.record(lambda n=n: compute(n), (), arena)
        assert torch.equal(made.replay(()), result)
    largest = 64 * 64 * 4
    assert sum(memory.nbytes for memory in arena.owned.values()) <= 8 * largest
