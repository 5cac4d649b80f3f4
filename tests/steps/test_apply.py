"""Events are the one way in beside a step: what each does, what it tells, and what it leaves alone."""

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nva.state.engine import EngineState, check, empty, is_busy
from nva.state.events import Abort, Arrive, Event, Fork, Stop, Told
from nva.state.limits import Limits
from nva.state.plan import Sampled
from nva.state.policy import first_come_first_served
from nva.state.request import Request, SamplingParams, request
from nva.steps.apply import apply, row_of
from nva.steps.commit import commit
from nva.steps.pack import pack
from nva.steps.schedule import schedule
from nva.testing import ToyKV, toy_forward, toy_sample, toy_tokens
from nva.testing.laws import snapshot

LIMITS = Limits(
    vocab_size=7,
    max_model_len=32,
    n_blocks=24,
    block_size=4,
    max_rows=4,
    max_batched_tokens=16,
)


def asked(id_: int | str, n: int = 1, prompt=(1, 2, 3), max_tokens: int = 6) -> Request:
    return request(id_, list(prompt), SamplingParams(temperature=0, n=n, max_tokens=max_tokens))


class Toy:
    """A state and its cache, stepped by hand."""

    def __init__(self, state: EngineState | None = None) -> None:
        self.state, self.kv = state or empty(LIMITS), ToyKV.empty(LIMITS)

    def step(self):
        self.state, plan = schedule(self.state)
        batch, draw = pack(self.state, plan)
        logits, self.kv = toy_forward(self.state.limits)(None, self.kv, batch)
        sampled = toy_sample(logits, draw)
        self.state, output = commit(self.state, plan, sampled)
        return sampled, output

    def apply(self, event: Event):
        before = snapshot(state := self.state)
        self.state, told = apply(state, event)
        assert snapshot(state) == before
        check(self.state)
        return told


def names(finished) -> list[tuple[int | str, int, str]]:
    return [(each.request.id, each.sample, each.reason) for each in finished]


def test_requests_arrive_together_or_not_at_all() -> None:
    toy = Toy()
    assert toy.apply(Arrive([asked("a"), asked("b")])) == Told()
    assert [entry.request.id for entry in toy.state.waiting] == ["a", "b"]
    with pytest.raises(ValueError, match="'b' is in flight already"):
        toy.apply(Arrive([asked("c"), asked("b")]))
    assert [entry.request.id for entry in toy.state.waiting] == ["a", "b"]


def test_an_abort_tells_of_every_sample_that_had_not_ended() -> None:
    toy = Toy()
    toy.apply(Arrive([asked("a", n=2), asked("b"), asked("c", n=4)]))
    toy.step()
    told = toy.apply(Abort(["a", "c", "unknown"]))
    assert names(told.finished) == [
        *[("c", sample, "abort") for sample in range(4)],  # it waits: 4 rows are not free
        ("a", 0, "abort"),
        ("a", 1, "abort"),
    ]
    assert [len(each.token_ids) for each in told.finished] == [0, 0, 0, 0, 1, 1]
    assert toy.apply(Abort(["a"])).finished == ()


def test_a_stop_ends_one_sample_once() -> None:
    toy = Toy()
    toy.apply(Arrive([asked("a", n=2)]))
    toy.step()
    (ended,) = toy.apply(Stop(id="a", sample=1, text="xyz")).finished
    assert (ended.sample, ended.reason, ended.stopped_by) == (1, "stop", "xyz")
    assert list(ended.token_ids) == toy_tokens([1, 2, 3], 1, 7)
    assert toy.apply(Stop(id="a", sample=1, text="xyz")).finished == ()
    assert row_of(toy.state, "a", 0) is not None


def test_a_stop_reaches_a_sample_that_was_preempted() -> None:
    """3 blocks of 4 tokens: the second sequence waits again when the first needs the last block."""
    toy = Toy(empty(attrs.evolve(LIMITS, n_blocks=3, prefix_caching=False)))
    toy.apply(Arrive([asked("a"), asked("b")]))
    while not any(entry.n_known > 3 for entry in toy.state.waiting):
        toy.step()
    (entry,) = toy.state.waiting
    (ended,) = toy.apply(Stop(id="b", sample=0, text="x")).finished
    assert list(ended.token_ids) == toy_tokens([1, 2, 3], entry.n_known - 3, 7)
    assert len(toy.state.waiting) == 0


def test_a_fork_goes_on_from_the_tokens_so_far() -> None:
    toy = Toy()
    toy.apply(Arrive([asked("a")]))
    with pytest.raises(ValueError, match="sample 0 of request 'a' is not running"):
        toy.apply(Fork(id="a", sample=0))
    toy.step()
    told = toy.apply(Fork(id="a", sample=0, n=2, first_sample=5))
    assert [row_of(toy.state, "a", sample) for sample in (5, 6)] == list(told.rows)
    ended = []
    while is_busy(toy.state):
        ended += toy.step()[1].finished
    assert sorted(each.sample for each in ended) == [0, 5, 6]
    assert {each.token_ids for each in ended} == {tuple(toy_tokens([1, 2, 3], 6, 7))}


@st.composite
def histories(draw: st.DrawFn):
    """Arrivals, aborts, stops, forks and steps (None), whether or not they fit what goes on."""
    found: list[Event | None] = []
    n_requests = 0
    for kind in draw(st.lists(st.sampled_from("asssssxtf"), max_size=20)):
        id_, sample = draw(st.integers(0, 5)), draw(st.integers(0, 1))
        if kind == "a":
            prompt = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
            found.append(Arrive([asked(n_requests, draw(st.integers(1, 2)), prompt)]))
            n_requests += 1
        else:
            others = {"x": Abort([id_]), "t": Stop(id=id_, sample=sample, text="t")}
            fork = Fork(id=id_, sample=sample)
            found.append(None if kind == "s" else others.get(kind, fork))
    return found


@given(histories())
def test_a_run_is_its_events_and_sampled_tokens(history) -> None:
    """Replayed without a model, they give the same state, and tell the same of every sample."""
    toy = Toy()
    record: list[Event | Sampled] = []
    ended = []
    for event in history:
        if event is None:
            if is_busy(toy.state):
                sampled, output = toy.step()
                record.append(sampled)
                ended += output.finished
            continue
        try:
            ended += toy.apply(event).finished
            record.append(event)
        except ValueError:
            assert isinstance(event, Fork)

    state, replayed = empty(LIMITS, first_come_first_served), []
    for each in record:
        if isinstance(each, Sampled):
            state, plan = schedule(state)
            state, output = commit(state, plan, each)
            replayed += output.finished
        else:
            state, told = apply(state, each)
            replayed += told.finished
    assert snapshot(state) == snapshot(toy.state)
    assert replayed == ended


def test_events_are_values() -> None:
    assert Abort([1, 2]) == Abort({2, 1})
    assert hash(Stop(id=1, sample=0, text="x")) == hash(Stop(id=1, sample=0, text="x"))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Abort([1]).ids = frozenset()
    assert np.array_equal(Arrive([asked(1)]).requests[0].prompt, [1, 2, 3])
