"""The laws of the engine over random events: arrivals, steps, aborts and forks, with pools that run
short."""

from collections import Counter

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from nva.state.blocks import Key
from nva.state.columns import freeze
from nva.state.engine import EngineState, empty, is_busy
from nva.state.errors import InvariantError
from nva.state.limits import Limits
from nva.state.request import SamplingParams, request
from nva.state.rows import SampleId, running, update
from nva.state.waiting import queue_of
from nva.steps import allocate, pack, prefix, recover, schedule
from nva.steps.submit import submit
from nva.testing import (
    Arrive,
    Event,
    Fail,
    Fork,
    Run,
    Step,
    Steps,
    ToyKV,
    events,
    fold,
    folds,
    limits,
    policies,
)
from nva.testing.folds import apply
from nva.testing.laws import snapshot
from nva.testing.reference import Decisions, ReferenceEngine


@st.composite
def cases(draw: st.DrawFn) -> tuple[Limits, list[Event]]:
    size = draw(limits())
    return size, draw(events(size))


def test_laws_hold_over_random_events() -> None:
    """Conservation, progress, write exclusivity, key identity, transparency, budgets, atomicity,
    poison, purity."""
    seen: Counter[str] = Counter()

    n_examples = (
        settings().max_examples
    )  # at least 300, always the same ones if few, to have seen everything happen

    @settings(
        max_examples=max(300, n_examples), derandomize=n_examples < 2_000 or settings().derandomize
    )
    @given(cases(), policies())
    def laws_hold(case, policy):
        run = fold(case[1], case[0], policy)
        seen.update(
            preempted=run.n_preempted,
            hit=run.n_hit,
            copied=run.n_copied,
            chunked=run.n_chunked,
            forked=len(run.forked),
        )

    laws_hold()
    assert all(seen[name] for name in ("preempted", "hit", "copied", "chunked", "forked")), seen


@given(cases(), policies())
def test_decisions_equal_the_mutable_reference(case, policy) -> None:
    """Who computes what, who is preempted, what is copied and found: as an engine of lists and
    dicts decides it."""
    size, given_events = case
    reference, run = (
        ReferenceEngine(size, policy),
        Run(state=empty(size, policy), kv=ToyKV.empty(size)),
    )

    def compared(state):
        after, plan = schedule.schedule(state)
        names = map(
            SampleId,
            after.rows.arrival[plan.rows].tolist(),
            after.rows.sample[plan.rows].tolist(),
        )
        work = zip(plan.starts.tolist(), plan.counts.tolist(), strict=True)
        assert reference.step() == Decisions(
            computed=dict(zip(names, work, strict=True)),
            preempted=list(plan.preempted),
            n_copied=len(plan.copies),
            n_hit=plan.n_hit,
        )
        return after, plan

    for event in [event for event in given_events if not isinstance(event, (Fork, Fail))]:
        if isinstance(event, Arrive):
            reference.submit(event.requests)
        elif not isinstance(event, Step) and run.requests:
            reference.abort(run.requests[event.number % len(run.requests)].id)
        apply(run, event, Steps(schedule=compared))
    while is_busy(run.state):
        apply(run, Step(), Steps(schedule=compared))


def test_a_row_that_is_preempted_and_placed_again_may_find_a_block_that_it_gave_up() -> None:
    size = Limits(
        vocab_size=7,
        max_model_len=9,
        n_blocks=11,
        block_size=1,
        max_rows=2,
        max_batched_tokens=6,
        max_scored_tokens=1,
    )
    slow = request(
        0, [1, 2, 1, 1, 2], SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1)
    )
    short = request(1, [1, 2, 1, 1, 2, 1, 0, 0], SamplingParams(temperature=0, max_tokens=1))
    twin = request(2, [1, 2, 1, 1, 2], SamplingParams(temperature=0, max_tokens=4))
    assert fold([Arrive(requests=(slow, short, twin))], size).n_preempted


def test_key_identity_holds_when_every_key_collides(monkeypatch) -> None:
    """All keys in one bucket of the hash table: only comparison can tell them apart."""
    monkeypatch.setattr(Key, "__hash__", lambda _: 0)
    n_hit = Counter[str]()

    @given(st.data())
    def laws_hold(data):
        size = data.draw(limits(prefix_caching=True))
        n_hit["tokens"] += fold(data.draw(events(size)), size).n_hit

    laws_hold()
    assert n_hit["tokens"]


@given(cases(), st.randoms(use_true_random=False))
def test_progress_is_bounded_under_a_hostile_policy(case, random) -> None:
    """Ranks drawn anew before every step: rows can't preempt each other for ever."""

    def hostile(state: EngineState):
        ranks = freeze(np.array([random.random() for _ in state.rows.rank]))
        waiting = queue_of(attrs.evolve(entry, rank=random.random()) for entry in state.waiting)
        return schedule.schedule(
            attrs.evolve(state, rows=attrs.evolve(state.rows, rank=ranks), waiting=waiting)
        )

    fold(case[1], case[0], steps=Steps(schedule=hostile))


@given(cases(), policies())
def test_replay_gives_the_same_states_and_older_states_stay_usable(case, policy) -> None:
    """Purity: every state of a run can be continued again after newer states were made of it, with
    the same results."""
    size, given_events = case
    run = Run(state=empty(size, policy), kv=ToyKV.empty(size))
    states, values = [run.state], [snapshot(run.state)]
    for event in given_events:
        apply(run, event, Steps())
        states.append(run.state)
        values.append(snapshot(run.state))
    for i, event in enumerate(given_events):
        if isinstance(event, Step) and is_busy(states[i]):
            first, plan = schedule.schedule(states[i])
            second, same_plan = schedule.schedule(states[i])
            assert (snapshot(first), plan) == (snapshot(second), same_plan)
        elif isinstance(event, Arrive):
            assert snapshot(submit(states[i], event.requests)) == values[i + 1]
    assert [snapshot(state) for state in states] == values


@given(st.data())
def test_shapes_are_bounded_by_the_buckets(data) -> None:
    size = data.draw(limits(max_rows=3, max_batched_tokens=8))
    size = attrs.evolve(size, token_buckets=(2, 4, 8), row_buckets=(2, 4))
    run = fold(data.draw(events(size)), size)
    assert (
        len(run.shapes) <= 3 * 2 * 2
    )  # token buckets, row buckets, logits without and with prompt scores
    assert {shape[0] for shape in run.shapes} <= {2, 4, 8}
    assert {shape[1] for shape in run.shapes} <= {2, 4}


def keep_keys(blocks, ids):
    """The ancestor's fault: a block taken for other tokens is still found under its old key."""
    return blocks


def share_without_counting(blocks, ids):
    return attrs.evolve(allocate.release(SHARE(blocks, ids), list(ids))) if ids else blocks


def write_shared_blocks(state, row_ids):
    """No copy-on-write: a shared open block counts as the row's own."""
    is_full, is_shared = SLOTS_DUE(state, row_ids)
    return is_full, np.zeros_like(is_shared)


def find_the_last_token(blocks, tokens, *rest):
    return MATCH(blocks, np.append(tokens, tokens[:1]), *rest)


def preempt_the_first(rows):
    return RUNNING(rows)[::-1]


def forget_to_release(state, row_ids):
    return attrs.evolve(VACATE(state, row_ids), blocks=state.blocks)


def advance_one_short(state, row_ids, counts):
    return ADVANCE(state, row_ids, counts - (counts > 1))


def publish_before_it_is_full(state, row_ids):
    rows = state.rows
    early = update(
        rows, row_ids, n_computed=rows.n_computed[row_ids] + 1, n_known=rows.n_known[row_ids] + 1
    )
    return attrs.evolve(PUBLISH(attrs.evolve(state, rows=early), row_ids), rows=rows)


def pad_into_the_pool(views, n, n_rows, size):
    PAD(views, n, n_rows, size)
    views["slots"][n:] += size.n_scratch * size.block_size


def keep_what_a_failed_step_overwrote(state, plan, batch):
    return recover.withdraw(
        state, plan, attrs.evolve(batch, slots=batch.slots[:0], copies=batch.copies[:0])
    )


SHARE, SLOTS_DUE, MATCH, RUNNING = allocate.share, allocate._slots_due, prefix.match, running
VACATE, ADVANCE, PUBLISH, PAD = allocate.vacate, schedule._advance, prefix.publish, pack._pad

FAULTS = [
    (allocate, "forget", keep_keys),
    (schedule, "share", share_without_counting),
    (allocate, "_slots_due", write_shared_blocks),
    (schedule, "match", find_the_last_token),
    (schedule, "vacate", forget_to_release),
    (schedule, "_advance", advance_one_short),
    (schedule, "publish", publish_before_it_is_full),
    (pack, "_pad", pad_into_the_pool),
    (folds, "withdraw", keep_what_a_failed_step_overwrote),
]


@pytest.mark.parametrize(
    ("module", "name", "fault"), FAULTS, ids=[fault.__name__ for *_, fault in FAULTS]
)
def test_the_laws_catch_a_faulty_step(module, name, fault, monkeypatch) -> None:
    """Each seeded fault is found within a few hundred runs: the laws above can fail."""
    monkeypatch.setattr(module, name, fault)

    @settings(
        max_examples=1000,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def laws_hold(case):
        fold(case[1], case[0], steps=Steps(withdraw=folds.withdraw))

    with pytest.raises((InvariantError, IndexError, KeyError, ValueError)):
        laws_hold()
