"""One step of the engine: the five pure parts and the one function that runs on the device.

The law: this is the only engine loop. Whoever steps an engine calls `step`: nva.run, a benchmark,
the check at start, the tests of laws, a notebook. They differ in the `Steps` they give, in the
forward, and in what they observe. Read next: steps/schedule.py, where a step begins; forward.py,
what the device computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from torch import Tensor

from nva.forward import KV, Forward
from nva.models.params import Params
from nva.state.engine import EngineState
from nva.state.plan import Batch, Draw, Output, Plan, Sampled
from nva.steps.commit import commit
from nva.steps.pack import pack
from nva.steps.recover import withdraw
from nva.steps.sample import sample
from nva.steps.schedule import schedule

Observe = Callable[[str, Any], Any]
"""`observe(part, result)` sees the result of each part by its name, and hands it on."""


@attrs.frozen(kw_only=True)
class Steps:
    """The step functions of an engine, each one replaceable: `Steps(schedule=mine)`."""

    schedule: Callable[[EngineState], tuple[EngineState, Plan]] = schedule
    pack: Callable[[EngineState, Plan], tuple[Batch, Draw]] = pack
    sample: Callable[[Tensor, Draw], Sampled] = sample
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
    """One step: plan it, compute it, take in what was sampled. Raises what its parts raise."""
    state, plan = observe("schedule", steps.schedule(state))
    batch, draw = observe("pack", steps.pack(state, plan))
    logits, kv = observe("forward", forward(params, kv, batch))
    sampled = observe("sample", steps.sample(logits, draw))
    state, output = observe("commit", steps.commit(state, plan, sampled))
    return state, kv, output
