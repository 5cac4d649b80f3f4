"""Test a scheduler of your own: write it wrong, and let Hypothesis find the shortest list of events
that shows it.

    python examples/test_your_scheduler.py

The wish: answers should not stutter while a long prompt is read, so a step that samples leaves
chunks of prompts out. (Whether that is wise is for a benchmark to say.) Two ways to write it
follow, and the engine's laws tell them apart. In a test suite of your own, put `@given(cases())`
around `fold(events, limits, steps=Steps(schedule=yours))`."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np
from hypothesis import find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from nva.state.engine import EngineState
from nva.state.errors import InvariantError
from nva.state.limits import Limits
from nva.state.plan import Plan
from nva.steps.schedule import schedule
from nva.testing import Abort, Arrive, Event, Fork, Steps, events, fold, limits

Schedule = Callable[[EngineState], "tuple[EngineState, Plan]"]
N_EXAMPLES = 300


def cross_out(state: EngineState) -> tuple[EngineState, Plan]:
    """Wrong: the chunks are crossed out of the plan, but the state has already counted their tokens
    as computed."""
    state, plan = schedule(state)
    kept, sources = np.unique(plan.sample_sources, return_inverse=True)
    if not len(kept) or plan.scores:  # scores are of the chunks that it would cross out
        return state, plan
    planned = {name: getattr(plan, name)[kept] for name in ("rows", "starts", "counts")}
    sources = sources.astype(np.int32)
    return state, attrs.evolve(plan, **planned, sample_sources=sources)


def hold_back(state: EngineState) -> tuple[EngineState, Plan]:
    """Right: a state is a value, so this step is given a state whose budget is its decode rows, and
    nothing to undo."""
    rows, limits = state.rows, state.limits
    n_decoding = int((rows.is_running & (rows.n_tokens - rows.n_computed == 1)).sum())
    budget = min(n_decoding or limits.max_batched_tokens, limits.max_batched_tokens)
    after, plan = schedule(
        attrs.evolve(state, limits=attrs.evolve(limits, max_batched_tokens=budget))
    )
    return attrs.evolve(after, limits=limits), plan


@st.composite
def cases(draw: st.DrawFn) -> tuple[Limits, list[Event]]:
    """Limits that run short, and events that strain them."""
    size = draw(limits(max_scored_tokens=9))  # so that it never binds
    return size, draw(events(size))


def broken_law(case: tuple[Limits, list[Event]], yours: Schedule) -> str | None:
    """What a scheduler breaks over these events, None if all laws hold."""
    try:
        fold(case[1], case[0], steps=Steps(schedule=yours))
    except InvariantError as error:
        return str(error)
    return None


def shortest_failure(yours: Schedule) -> tuple[Limits, list[Event]] | None:
    """The simplest case found in which the scheduler breaks a law."""
    profile = settings(max_examples=N_EXAMPLES, derandomize=True, database=None, deadline=None)
    try:
        return find(cases(), lambda case: broken_law(case, yours) is not None, settings=profile)
    except NoSuchExample:
        return None


def describe(event: Event) -> str:
    """The event as a line."""
    if isinstance(event, Arrive):
        return "arrive  " + ", ".join(
            f"{r.prompt.tolist()} + {r.params.max_tokens} tokens" for r in event.requests
        )
    return f"{type(event).__name__.lower()}" + (
        f"  {event.number}" if isinstance(event, (Abort, Fork)) else ""
    )


def main() -> None:
    """Try both schedulers."""
    for yours in (cross_out, hold_back):
        case = shortest_failure(yours)
        if case is None:
            print(f"{yours.__name__}: every law holds over {N_EXAMPLES} lists of events")
            continue
        size, found = case
        print(f"{yours.__name__} breaks a law. The simplest case found:")
        pool = f"{size.n_blocks} blocks of {size.block_size}"
        print(f"  {pool}, {size.max_rows} rows, {size.max_batched_tokens} tokens a step")
        print("\n".join(f"  {describe(event)}" for event in found))
        print(f"  {broken_law(case, yours)}")


if __name__ == "__main__":
    main()
