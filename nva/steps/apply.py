"""Events happen to a state: the one door through which it changes beside a step.

The law: `apply` is pure, and an event that raises ValueError has changed nothing. Events and
sampled tokens are all that a run depends on. Read next: state/events.py for the events;
steps/schedule.py, where a step begins."""

from __future__ import annotations

from collections.abc import Collection

from nva.state.columns import evolve
from nva.state.engine import EngineState
from nva.state.events import Abort, Arrive, Event, Fork, RequestId, Stop, Told
from nva.state.request import Finished, FinishReason
from nva.state.rows import request_of, running
from nva.state.waiting import Waiting, waiting_of, without, without_entry
from nva.steps.allocate import fork, vacate
from nva.steps.commit import finished_row
from nva.steps.submit import submit


def apply(state: EngineState, event: Event) -> tuple[EngineState, Told]:
    """The state after an event, and what it brought. Raises ValueError for an event that the state
    can't take: a request that doesn't fit, a fork of a sample that isn't decoding."""
    match event:
        case Arrive(requests):
            return submit(state, requests), Told()
        case Abort(ids):
            state, finished = abort(state, ids)
            return state, Told(finished=tuple(finished))
        case Stop():
            state, ended = stop(state, event.id, event.sample, event.text)
            return state, Told(finished=() if ended is None else (ended,))
        case Fork():
            row = row_of(state, event.id, event.sample)
            if row is None:
                raise ValueError(
                    f"sample {event.sample} of request {event.id!r} is not running; fork one that "
                    "decodes"
                )
            state, rows = fork(state, row, event.n, event.first_sample)
            return state, Told(rows=tuple(rows))


def abort(state: EngineState, ids: Collection[RequestId]) -> tuple[EngineState, list[Finished]]:
    """End all that waits or runs of these requests; ids that are not in flight are passed over."""
    # 1. What waits leaves the queue.
    staying, leaving = without(state.waiting, ids)
    finished = [
        _finished_entry(entry, sample)
        for entry in leaving
        for sample in range(entry.sample, entry.sample + entry.n_samples)
    ]
    # 2. What runs gives its blocks back. A prompt still being computed stands for all its samples.
    rows = state.rows
    ending = [row for row in running(rows).tolist() if request_of(rows, row).id in ids]
    finished += [
        finished_row(rows, row, int(rows.sample[row]) + i, "abort")
        for row in ending
        for i in range(int(rows.n_samples[row]))
    ]
    return vacate(evolve(state, waiting=staying), ending), finished


def _finished_entry(
    entry: Waiting, sample: int, reason: FinishReason = "abort", stopped_by: str | None = None
) -> Finished:
    """What is told of a sample that ends while it waits: it has tokens if it was preempted."""
    return Finished(
        request=entry.request,
        sample=sample,
        reason=reason,
        stopped_by=stopped_by,
        token_ids=tuple(entry.tokens[len(entry.request.prompt) :].tolist()),
        n_cached=entry.n_cached or 0,
    )


def stop(
    state: EngineState, request_id: RequestId, sample: int, text: str
) -> tuple[EngineState, Finished | None]:
    """End one sample because its text holds a stop string; None if it has ended already."""
    row = row_of(state, request_id, sample)
    if row is not None:
        return vacate(state, [row]), finished_row(state.rows, row, sample, "stop", text)
    entry = waiting_of(state.waiting, request_id, sample)  # it may have been preempted
    if entry is not None and entry.n_samples == 1:
        waiting = without_entry(state.waiting, entry)
        return evolve(state, waiting=waiting), _finished_entry(entry, sample, "stop", text)
    return state, None


def row_of(state: EngineState, request_id: RequestId, sample: int) -> int | None:
    """The row in which a sample runs, None if it waits or has ended."""
    rows = state.rows
    for row in (rows.is_running & (rows.sample == sample)).nonzero()[0].tolist():
        if request_of(rows, row).id == request_id:
            return row
    return None
