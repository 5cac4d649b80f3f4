"""A loaded model and what it serves: the only mutable thing of nva, and one step of it.

The law: a change happens in full or not at all. A step that raises has told nothing, and the engine
goes on from where it was, wherever an interrupt falls and however many follow. What changes an
engine's state is a step or an event: `step`, `send` and `post` here, and nothing else.

Threads. `lock` is held by whoever reads or replaces the fields here, for the length of a step
too. It can be taken again by the thread that holds it, since the garbage collector and signal
handlers run code in the midst of anything. For them there is `changing`, locked while the next
state is computed from the present one: a second change within the first would be lost. A step is
refused then; an Abort is put beside, in `posted`, and applied when the change is over.

Read next: loop.py, the step itself; streams.py, who calls for steps."""

from __future__ import annotations

import copy
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import attrs

from nva.forward import KV, Forward
from nva.host.forks import lock_across_forks
from nva.loop import Observe, Steps, unobserved
from nva.loop import step as one_step
from nva.models.checkpoint import Checkpoint
from nva.models.params import Params
from nva.state.engine import EngineState, check
from nva.state.events import Abort, Event, Told
from nva.state.plan import Output
from nva.steps.apply import apply
from nva.text.answers import (
    Answers,
    StreamEvent,
    Transcript,
    deliver,
    end,
    expect,
    forget,
    take_events,
)
from nva.text.chat import Tokenizer
from nva.text.detokenize import Detokenizer
from nva.text.images import ImageReader

R = TypeVar("R")


@attrs.frozen(kw_only=True)
class Before:
    """What a change started from, to go back to if it doesn't come to its end."""

    state: EngineState
    answers: Answers
    seen: dict[str, Any] = attrs.field(factory=dict[str, Any])
    # ^ what more must go back: a copy of the KV handle, which the forward uses up; what the parts
    #   of a step gave; what was taken from `posted`


@attrs.define(kw_only=True, eq=False, repr=False)
class Engine:
    """A loaded model and what it is serving."""

    name: str
    checkpoint: Checkpoint
    params: Params
    forward: Forward
    steps: Steps
    kv: KV
    state: EngineState
    tokenizer: Tokenizer | None
    reader: ImageReader | None  # of images, for a model that sees
    detokenizer: Detokenizer  # that has seen nothing
    eos_ids: frozenset[int]  # union of config, generation_config and tokenizer
    defaults: Mapping[str, Any]  # of SamplingParams, from generation_config
    observe: Observe = unobserved  # sees each part of a step, and each event as "event"
    ids: Iterator[int] = attrs.field(factory=itertools.count)  # of requests to come
    answers: Answers = attrs.field(factory=Answers)  # to the requests in flight
    lock: Any = attrs.field(factory=lock_across_forks, init=False)
    changing: Any = attrs.field(factory=threading.Lock, init=False)
    encoding: Any = attrs.field(factory=lock_across_forks, init=False)  # held to use the tokenizer
    before: Before | None = attrs.field(default=None, init=False)  # of a change that hasn't ended
    posted: deque[tuple[Abort, int | None]] = attrs.field(
        factory=deque[tuple[Abort, "int | None"]], init=False
    )
    threads: dict[int, ThreadPoolExecutor] = attrs.field(
        factory=dict[int, ThreadPoolExecutor], init=False
    )  # one thread for async streams, by process

    def __repr__(self) -> str:
        rows, blocks = self.state.rows, self.state.blocks
        return (
            f"Engine({self.name}: {int(rows.is_running.sum())} rows running, "
            f"{len(self.state.waiting)} waiting, "
            f"{blocks.n_free} of {self.state.limits.n_blocks} blocks free)"
        )


def step(engine: Engine) -> Output:
    """One step of the engine, all of it, its tokens told to the streams that wait for them. Any
    thread may call it.

    If it raises, nothing was told, and the engine can go on from where it was before. Raises
    RuntimeError within a step of the same thread."""
    return _change(engine, _step)


def send(engine: Engine, event: Event, transcripts: Collection[Transcript] = ()) -> Told:
    """Apply an event now: requests arrive, an abort. `transcripts` are of the requests that arrive
    and have a reader. Raises what apply() raises, and RuntimeError within a step of the same
    thread."""

    def sent(engine: Engine) -> Told:
        engine.answers = expect(engine.answers, transcripts)
        return _apply(engine, event)

    return _change(engine, sent)


def read(engine: Engine, call: int) -> list[StreamEvent]:
    """What a call was told and has not read yet."""

    def taken(engine: Engine) -> list[StreamEvent]:
        engine.answers, events = take_events(engine.answers, call)
        return events

    return _change(engine, taken)


def post(engine: Engine, event: Abort, closed: int | None = None) -> None:
    """Have requests aborted at the next settle(). Never waits, whoever calls it: any thread, a
    signal handler, the garbage collector. `closed` is a call that reads no more."""
    engine.posted.append((event, closed))


def settle(engine: Engine) -> None:
    """Apply what was posted. While a step is being taken this returns at once, since whoever takes
    it settles at its end."""
    if not engine.posted or engine.changing.locked():
        return
    with engine.lock:
        while engine.posted and not engine.changing.locked():
            _in_full(engine, _abort_first)


def _abort_first(engine: Engine) -> None:
    """The change that what was posted first makes."""
    assert engine.before is not None
    if not engine.posted:  # a signal handler came before
        return
    engine.before.seen["posted"] = engine.posted[0]  # which goes back if this is interrupted
    event, closed = engine.posted.popleft()
    if closed is not None:
        engine.answers = forget(engine.answers, closed, event.ids)
    _apply(engine, event)


def thread_of(engine: Engine) -> ThreadPoolExecutor:
    """The one thread that takes the steps of async streams. A forked child has its own, since
    threads don't survive a fork."""
    pid = os.getpid()
    if pid not in engine.threads:
        engine.threads.setdefault(pid, ThreadPoolExecutor(1, thread_name_prefix="nva"))
    return engine.threads[pid]


def _change(engine: Engine, change: Callable[[Engine], R]) -> R:
    """Make a change of the engine, and settle what was posted meanwhile."""
    try:
        with engine.lock:
            if engine.changing.locked():
                raise RuntimeError(
                    "this thread is within a step of the engine already; a signal handler can't "
                    "take another"
                )
            return _in_full(engine, change)
    finally:
        settle(engine)


def _in_full(engine: Engine, change: Callable[[Engine], R]) -> R:
    """Make a change, or go back to where it began if it raises."""
    try:
        with engine.changing:
            _go_back(engine)  # the way back from the last change may have been interrupted
            engine.before = Before(state=engine.state, answers=engine.answers)
            result = change(engine)
            engine.before = None
            return result
    except BaseException:
        with engine.changing:
            _go_back(engine)
        raise


def _go_back(engine: Engine) -> None:
    """Take back a change that didn't come to its end, if there is one. If this is interrupted, it
    is done again before the next change."""
    before = engine.before
    if before is None:
        return
    state, seen = before.state, before.seen
    if "pack" in seen:  # the forward may have written
        plan, batch = seen["schedule"][1], seen["pack"][0]
        state = engine.steps.withdraw(state, plan, batch)
        engine.kv = KV(seen["kv"].layers, state.generation)
    elif "kv" in seen:  # the forward may have used the handle up
        engine.kv = seen["kv"]
    if "posted" in seen:  # perhaps it is there still, and an abort is done twice
        engine.posted.appendleft(seen["posted"])
    engine.state, engine.answers = state, before.answers
    engine.before = None


def _step(engine: Engine) -> Output:
    """The change that a step makes."""
    assert engine.before is not None
    seen = engine.before.seen
    seen["kv"] = copy.copy(engine.kv)

    def remember(part: str, result: Any) -> Any:
        seen[part] = result
        return engine.observe(part, result)

    engine.state, engine.kv, output = one_step(
        engine.steps, engine.forward, engine.params, engine.state, engine.kv, remember
    )
    engine.answers, stops = deliver(engine.answers, output)
    for stop in stops:
        _apply(engine, stop)
    if os.environ.get("NVA_CHECK") == "1":
        check(engine.state)
    return output


def _apply(engine: Engine, event: Event) -> Told:
    """Let an event happen, and tell those whose samples it ends."""
    event = engine.observe("event", event)
    engine.state, told = apply(engine.state, event)
    engine.answers = end(engine.answers, told.finished)
    return told
