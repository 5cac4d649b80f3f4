"""One step of the engine: the five pure parts and the one function that runs on the device.

The law: this is the only engine loop. Whoever steps an engine calls `step`: nva.run, a benchmark,
the check at start, the tests of laws, a notebook. They differ in the `Steps` they give, in the
forward, and in what they observe. Read next: steps/schedule.py, where a step begins; forward.py,
what the device computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import attrs
from torch import Tensor

from nva.forward import KV, Forward
from nva.models.params import Params
from nva.state.columns import evolve
from nva.state.engine import EngineState
from nva.state.plan import Batch, Draw, Output, Plan, Sampled
from nva.steps.commit import commit
from nva.steps.pack import pack
from nva.steps.recover import withdraw
from nva.steps.sample import sample
from nva.steps.schedule import schedule

Observe = Callable[[str, Any], Any]
"""`observe(part, result)` sees the result of each part of a step, and hands it on: a clock, a
checker of laws, a recorder, a profiler's range."""


@attrs.frozen(kw_only=True)
class Sampler:
    """A sampler that remembers something from step to step, as a pair of pure functions.

    What it remembers is part of the engine's state: a step that fails has not changed it.
    """

    init: Callable[[], Any]
    """() -> what it remembers before the first step."""
    step: Callable[[Any, Tensor, Draw], tuple[Any, Sampled]]
    """(remembered, logits, draw) -> (remembered, sampled)"""


@attrs.frozen(kw_only=True)
class Steps:
    """The step functions of an engine, each one replaceable: `Steps(schedule=mine)`.

    `sample` is a plain function (logits, draw) -> sampled, or a Sampler."""

    schedule: Callable[[EngineState], tuple[EngineState, Plan]] = schedule
    pack: Callable[[EngineState, Plan], tuple[Batch, Draw]] = pack
    sample: Callable[[Tensor, Draw], Sampled] | Sampler = sample
    commit: Callable[[EngineState, Plan, Sampled], tuple[EngineState, Output]] = commit
    withdraw: Callable[[EngineState, Plan, Batch], EngineState] = withdraw


def unobserved(part: str, result: Any) -> Any:
    """Hand the result on."""
    return result


def step(
    steps: Steps,
    forward: Forward,
    params: Params,
    state: EngineState,
    kv: KV,
    observe: Observe = unobserved,
) -> tuple[EngineState, KV, Output]:
    """One step: plan it, compute it, take in what was sampled. Raises what its parts raise, and
    TypeError for a part that gives something else than it should."""

    def seen(part: str, result: Any, *kinds: type) -> Any:
        """A part's result, checked, as the observer hands it on."""
        observed = observe(part, checked_pair(part, result, *kinds))
        return result if observed is result else checked_pair(part, observed, *kinds)

    state, plan = seen("schedule", steps.schedule(state), EngineState, Plan)
    batch, draw = seen("pack", steps.pack(state, plan), Batch, Draw)
    logits, kv = seen("forward", forward(params, kv, batch), object, object)
    state, sampled = _sampled(steps.sample, state, logits, draw)
    sampled = checked_sampled(observe("sample", sampled), draw, state.limits.vocab_size)
    state, output = seen("commit", steps.commit(state, plan, sampled), EngineState, Output)
    return state, kv, output


def _sampled(
    function: Callable[[Tensor, Draw], Sampled] | Sampler,
    state: EngineState,
    logits: Tensor,
    draw: Draw,
) -> tuple[EngineState, Sampled]:
    """What a sampler gives, and the state with what it remembers."""
    if not isinstance(function, Sampler):
        return state, function(logits, draw)
    remembered = state.sampler_state
    if remembered is None:
        remembered = function.init()
    found = function.step(remembered, logits, draw)
    remembered, sampled = checked_pair("sample", found, object, Sampled)
    return evolve(state, sampler_state=remembered), sampled


def checked_pair(part: str, result: Any, first: type, second: type) -> Any:
    """A part's result, a pair of these records. Raises TypeError if it is something else."""
    pair = cast("tuple[Any, ...]", result)
    if not isinstance(result, (tuple, list)) or len(pair) != 2:
        raise TypeError(
            f"{part} gave {_shown(pair)}; give a pair, ({_name(first)}, {_name(second)}): the step "
            "function returns it, and an observer hands it on"
        )
    for place, each, wanted in (("first", pair[0], first), ("second", pair[1], second)):
        if not isinstance(each, wanted):
            raise TypeError(
                f"{part} gave {_shown(each)} as the {place} of its pair; give {_name(wanted)}"
            )
    return pair


def checked_sampled(sampled: Any, draw: Draw, vocab_size: int) -> Sampled:
    """What a sampler gave: one token of the vocabulary for each entry of its draw. Raises TypeError
    or ValueError if it is something else."""
    if not isinstance(sampled, Sampled):
        raise TypeError(
            f"sample gave {_shown(sampled)}; give Sampled(tokens=..., is_finite=...), or a pair of "
            "a sampler's memory and that from a Sampler"
        )
    shape = (len(draw.logit_rows),)
    for name, kinds, form in (("tokens", "iu", "token ids"), ("is_finite", "b", "bools")):
        column: Any = getattr(sampled, name)
        if column.shape != shape or column.dtype.kind not in kinds:
            raise ValueError(
                f"sample gave {name} of shape {column.shape} and dtype {column.dtype}; give an "
                f"array of {form} of shape {shape}, one for each entry of the draw"
            )
    tokens = sampled.tokens
    if shape[0] and (tokens.min() < 0 or tokens.max() >= vocab_size):
        is_wrong = ((tokens < 0) | (tokens >= vocab_size)) & sampled.is_finite
        for token in tokens[is_wrong].tolist():
            raise ValueError(f"sample gave token {token}; the vocabulary is [0, {vocab_size})")
    return sampled


def _name(wanted: type) -> str:
    return "anything" if wanted is object else wanted.__name__


def _shown(found: object) -> str:
    """A result in a message: what it is, and how it begins."""
    return f"{type(found).__name__} {found!r:.60}"
