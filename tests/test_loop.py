"""One step, observed: wrong parts are named, a Sampler remembers, a recorded run is replayed."""

import attrs
import numpy as np
import pytest

import nva
from nva.engine import send, step
from nva.loop import Sampler, Steps
from nva.state.columns import evolve
from nva.state.engine import empty, is_busy
from nva.state.events import Arrive
from nva.state.plan import Sampled
from nva.state.request import request
from nva.state.waiting import queue_of
from nva.steps.apply import apply
from nva.steps.commit import commit
from nva.steps.pack import pack
from nva.steps.schedule import schedule
from nva.testing import toy_sample
from nva.testing.laws import snapshot
from tests.toy_engine import LIMITS, expected, prompts_of, toy_engine

SHORT = nva.SamplingParams(max_tokens=6)


def changed(part: str, change):
    """Steps one of whose functions gives `change(what it should give)`."""
    function = {"sample": toy_sample}.get(part) or getattr(Steps(), part)
    return {part: lambda *args: change(function(*args))}


def sampled(**fields):
    return lambda found: attrs.evolve(found, **fields)


WRONG = {
    "no pair": ("schedule", lambda found: found[1], r"schedule gave Plan .*; give a pair, \(EngineState, Plan\)"),
    "nothing": ("schedule", lambda _: None, r"schedule gave NoneType None; give a pair, \(EngineState, Plan\)"),
    "three": ("pack", lambda found: (*found, 1), r"pack gave tuple .*; give a pair, \(Batch, Draw\)"),
    "a batch alone": ("pack", lambda found: found[0], r"pack gave Batch .*; give a pair, \(Batch, Draw\)"),
    "the wrong way round": ("schedule", lambda found: found[::-1], "schedule gave Plan .* as the first of its pair; give EngineState"),
    "another record": ("pack", lambda found: (found[0], found[0]), "pack gave Batch .* as the second of its pair; give Draw"),
    "no output": ("commit", lambda found: (found[0], None), "commit gave NoneType None as the second of its pair; give Output"),
    "tokens alone": ("sample", lambda found: found.tokens, r"sample gave ndarray .*; give Sampled\(tokens"),
    "a token too many": ("sample", sampled(tokens=np.zeros(2, np.int32)), r"sample gave tokens of shape \(2,\) and dtype int32; give an array of token ids of shape \(1,\)"),
    "floats": ("sample", sampled(tokens=np.zeros(1)), "tokens of shape .* and dtype float64; give an array of token ids"),
    "no bools": ("sample", sampled(is_finite=np.ones(1, np.int32)), "is_finite of shape .* and dtype int32; give an array of bools"),
    "beyond the vocabulary": ("sample", sampled(tokens=np.full(1, 7, np.int32)), r"sample gave token 7; the vocabulary is \[0, 7\)"),
    "negative": ("sample", sampled(tokens=np.full(1, -1, np.int32)), "sample gave token -1"),
}  # fmt: skip


@pytest.mark.parametrize(("part", "change", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_step_that_gives_something_else_is_named(part, change, message) -> None:
    engine = toy_engine(**changed(part, change))
    with pytest.raises((TypeError, ValueError), match=message):
        nva.generate(engine, "abc", SHORT)
    engine.steps = Steps(sample=toy_sample)
    assert nva.generate(engine, "abc", SHORT)[0].text == expected("abc", 6)


def test_an_observer_that_keeps_what_it_saw_is_named() -> None:
    engine = toy_engine()
    for kept in ("schedule", "pack", "forward", "commit"):
        engine.observe = lambda part, result, kept=kept: None if part == kept else result
        message = f"{kept} gave NoneType None; .* an observer hands it on"
        with pytest.raises(TypeError, match=message):
            nva.generate(engine, "abc", SHORT)
    engine.observe = lambda part, result: None if part == "sample" else result
    with pytest.raises(TypeError, match="sample gave NoneType None; give Sampled"):
        nva.generate(engine, "abc", SHORT)


def test_a_forward_that_forgets_the_cache_is_named() -> None:
    engine = toy_engine()
    forward = engine.forward
    engine.forward = lambda *args: forward(*args)[0]
    with pytest.raises(TypeError, match="forward gave ndarray"):
        nva.generate(engine, "abc", SHORT)


def test_what_a_row_without_finite_logits_got_is_not_read() -> None:
    def failing(logits, draw):
        n = len(draw.logit_rows)
        return Sampled(tokens=np.full(n, -1, np.int32), is_finite=np.zeros(n, np.bool_))

    (answer,) = nva.generate(toy_engine(sample=failing), "abc", SHORT)
    assert (answer.finish_reason, answer.token_ids) == ("abort", ())


def counting() -> Sampler:
    """Gives 0, 1, 2, ... over all samples, whatever the model says; remembers where it is."""

    def count(n_drawn, logits, draw):
        n = len(draw.logit_rows)
        tokens = (n_drawn + np.arange(n)).astype(np.int32) % LIMITS.vocab_size
        return n_drawn + n, Sampled(tokens=tokens, is_finite=np.ones(n, np.bool_))

    return Sampler(init=lambda: 0, step=count)


def test_a_sampler_remembers_from_step_to_step() -> None:
    engine = toy_engine(sample=counting())
    assert nva.generate(engine, "abc", SHORT)[0].text == "abcdef"
    assert nva.generate(engine, "abc", SHORT)[0].text == "gabcde"
    assert engine.state.sampler_state == 12


def test_a_failed_step_has_not_changed_what_a_sampler_remembers() -> None:
    engine, calls = toy_engine(sample=counting()), []

    def failing(state, plan, sampled):
        calls.append(plan)
        if len(calls) == 3:
            raise RuntimeError("no luck")
        return commit(state, plan, sampled)

    engine.steps = attrs.evolve(engine.steps, commit=failing)
    send(engine, Arrive([request("mine", [0, 1], SHORT)]))
    step(engine), step(engine)
    with pytest.raises(RuntimeError, match="no luck"):
        step(engine)
    assert engine.state.sampler_state == 2
    while is_busy(engine.state):
        output = step(engine)
    assert output.finished[0].token_ids == (0, 1, 2, 3, 4, 5)


def test_a_sampler_that_forgets_its_memory_is_named() -> None:
    sampler = Sampler(init=lambda: 0, step=lambda memory, logits, draw: toy_sample(logits, draw))
    with pytest.raises(
        TypeError, match=r"sample gave Sampled .*; give a pair, \(anything, Sampled\)"
    ):
        nva.generate(toy_engine(sample=sampler), "abc", SHORT)


def test_a_scheduler_of_ones_own_is_served() -> None:
    """One that lets only the newest request decode, and so answers in reverse."""
    order = []

    def newest_first(state):
        last_first = queue_of(
            attrs.evolve(entry, rank=-float(entry.arrival)) for entry in state.waiting
        )
        return schedule(evolve(state, waiting=last_first))

    engine = toy_engine(attrs.evolve(LIMITS, max_rows=1), schedule=newest_first)
    prompts = prompts_of(3)
    for event in nva.stream(engine, prompts, SHORT):
        if isinstance(event, nva.Completion):
            order.append(event.index)
            assert event.text == expected(prompts[event.index], 6)
    assert order == [2, 1, 0]


def test_a_served_run_is_replayed_from_its_events_and_tokens() -> None:
    """Stops of text, aborts and all: without a model or a text the same state comes about."""
    engine, record = toy_engine(), []
    n_forwards = 0

    def observe(part, result):
        nonlocal n_forwards
        n_forwards += part == "forward"
        if part in ("event", "sample"):
            record.append(result)
        return result

    engine.observe = observe
    stop = expected("abc", 9)[4:6]
    first = nva.stream(engine, ["abc", "cba"], nva.SamplingParams(max_tokens=9, stop=stop, n=2))
    next(first)
    doomed = nva.stream(engine, "aaa", nva.SamplingParams(max_tokens=100))
    next(doomed), next(doomed)
    doomed.close()
    answers = [event for event in first if isinstance(event, nva.Completion)]
    assert answers[0].stopped_by == stop
    assert {type(each).__name__ for each in record} == {"Arrive", "Abort", "Stop", "Sampled"}

    state = empty(LIMITS)
    for each in record:
        if isinstance(each, Sampled):
            state, plan = schedule(state)
            pack(state, plan)
            state, _ = commit(state, plan, each)
        else:
            state, _ = apply(state, each)
    assert snapshot(state) == snapshot(engine.state)
    assert n_forwards == sum(isinstance(each, Sampled) for each in record)
