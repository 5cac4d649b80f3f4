"""A loaded model and what it serves: the only mutable thing of nva, and one step of it.

The law: a step that raises has told nothing, and the engine goes on from where it was before.
Read next: loop.py, the step itself; run.py, who calls for steps.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Mapping
from typing import Any

import attrs

from nva.forward import KV, Forward
from nva.loop import Steps
from nva.loop import step as one_step
from nva.models.checkpoint import Checkpoint
from nva.models.params import Params
from nva.state.engine import EngineState, check
from nva.state.plan import Output
from nva.steps.commit import abort
from nva.text.answers import Answers, deliver, forget
from nva.text.chat import Tokenizer
from nva.text.detokenize import Detokenizer
from nva.text.images import ImageReader


@attrs.define(kw_only=True, eq=False, repr=False)
class Engine:
    """A loaded model and what it is serving. The only mutable thing of nva; its steps are in
    run.py."""

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
    n_requests: int = 0
    answers: Answers = attrs.field(factory=Answers)  # to the requests in flight
    lock: Any = attrs.field(
        factory=threading.RLock, init=False
    )  # held by whoever reads or replaces the fields here
    stepping: Any = attrs.field(factory=threading.Lock, init=False)  # held within a step
    closed: list[Collection[int | str]] = attrs.field(
        factory=list, init=False
    )  # ids of streams, to be aborted

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

    If it raises, nothing was told, and the engine can go on from where it was before. That holds
    wherever an interrupt falls, between the forward's return and the assignment of its handle as
    well."""
    with engine.lock:
        if engine.stepping.locked():
            raise RuntimeError(
                "this thread is within a step of the engine already; a signal handler can't take "
                "another"
            )
        try:
            with engine.stepping:
                return _step(engine)
        finally:
            sweep(engine)


def _step(engine: Engine) -> Output:
    before, answers = engine.state, engine.answers
    caches, generation = engine.kv.layers, engine.kv.generation
    seen: dict[str, Any] = {}

    def remember(part: str, result: Any) -> Any:
        seen[part] = result
        return result

    try:
        state, engine.kv, output = one_step(
            engine.steps, engine.forward, engine.params, before, engine.kv, remember
        )
        engine.state, engine.answers = deliver(state, answers, output)
    except BaseException:
        if "pack" in seen:  # the forward may have written
            plan, batch = seen["schedule"][1], seen["pack"][0]
            before = engine.steps.withdraw(before, plan, batch)
        engine.kv, engine.state, engine.answers = KV(caches, generation), before, answers
        raise
    if os.environ.get("NVA_CHECK") == "1":
        check(engine.state)
    return output


def sweep(engine: Engine) -> None:
    """End the requests of the streams that were closed. Not within a step, where the garbage
    collector may close some: the state that it ends with would have them again."""
    while engine.closed and not engine.stepping.locked():
        ids = engine.closed[0]
        engine.state, engine.answers = abort(engine.state, ids)[0], forget(engine.answers, ids)
        engine.closed.remove(ids)
