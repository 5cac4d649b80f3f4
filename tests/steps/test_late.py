"""A step may be committed after the next one was planned and computed: the answers are the same."""

from collections import Counter

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nva.state.engine import EngineState, check, empty
from nva.state.limits import Limits
from nva.state.plan import Sampled
from nva.state.request import SamplingParams, request
from nva.state.rows import SampleId, running, token_ids
from nva.steps.allocate import fork, vacate
from nva.steps.commit import commit
from nva.steps.pack import pack
from nva.steps.schedule import preempt, schedule
from nva.steps.submit import submit
from nva.testing import Event, Run, ToyKV, events, fold, limits, policies, toy_forward, toy_sample

LIMITS = Limits(vocab_size=7, max_model_len=32, n_blocks=8, block_size=4, max_rows=3, lookahead=1)
GREEDY = SamplingParams(temperature=0, max_tokens=9)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Limits, list[Event]]:
    size = draw(limits(lookahead=draw(st.sampled_from([0, 1, 1, 1, 2]))))
    return size, draw(events(size))


def answers(run: Run) -> dict[tuple[str, int], tuple[int, ...]]:
    """What each sample that ran to its end has got."""
    return {
        (str(found.request.id), found.sample): found.token_ids
        for found in run.finished
        if found.reason != "abort"
    }


def test_answers_are_the_same_whether_a_step_is_committed_at_once_or_one_step_late() -> None:
    """fold() checks every answer against the toy model's, and all laws, after each event."""
    seen: Counter[str] = Counter()
    n_examples = settings().max_examples

    @settings(
        max_examples=max(300, n_examples), derandomize=n_examples < 2_000 or settings().derandomize
    )
    @given(cases(), policies())
    def laws_hold(case, policy):
        late = fold(case[1], case[0], policy, is_late=True)
        soon = answers(fold(case[1], case[0], policy))
        both = answers(late).keys() & soon.keys()
        assert {key: answers(late)[key] for key in both} == {key: soon[key] for key in both}
        seen.update(
            on_device=late.n_on_device,
            preempted=late.n_preempted,
            passed_over=late.n_passed_over,
            refilled=late.n_refilled,
            hit=late.n_hit,
            copied=late.n_copied,
            forked=len(late.forked),
            stopped=late.n_stopped,
            scored=len(late.scores),
            penalized=sum(r.params.frequency_penalty > 0 for r in late.requests),
            sampled_together=sum(r.params.n > 1 for r in late.requests),
        )

    laws_hold()
    names = (
        "on_device preempted passed_over refilled hit copied forked stopped scored penalized "
        "sampled_together"
    )
    assert all(seen[name] for name in names.split()), seen


def sampled(*tokens: int) -> Sampled:
    return Sampled(tokens=np.array(tokens, np.int32), is_finite=np.ones(len(tokens), np.bool_))


def prefilled(*requests) -> tuple[EngineState, object]:
    """All prompts are planned, none of their samples has come."""
    return schedule(submit(empty(LIMITS), requests))


def test_a_row_is_planned_beyond_its_known_tokens_by_the_lookahead_and_no_further() -> None:
    state, first = prefilled(request(0, [1, 2], GREEDY))
    state, second = schedule(state)
    assert (second.starts.tolist(), second.token_sources.tolist()) == ([2], [0])
    batch, draw = pack(state, second)
    assert (batch.token_source.tolist(), draw.positions.tolist()) == ([0], [3])
    same, third = schedule(state)
    assert same is state and not len(third.rows)
    with pytest.raises(ValueError, match="the plan is empty.*commit the step before"):
        pack(same, third)
    state, _ = commit(state, first, sampled(5))
    state, third = schedule(state)
    assert third.starts.tolist() == [3]


def test_without_lookahead_a_row_waits_for_its_token() -> None:
    state, _ = schedule(submit(empty(attrs.evolve(LIMITS, lookahead=0)), [request(0, [1], GREEDY)]))
    assert not len(schedule(state)[1].rows)


def test_no_row_is_planned_past_its_end() -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    state, _ = prefilled(request(0, [1, 2], params))
    state, second = schedule(state)
    assert second.sample_positions.tolist() == [3]
    state, third = schedule(attrs.evolve(state, limits=attrs.evolve(LIMITS, lookahead=9)))
    assert not len(third.rows)
    check(state)


def test_a_row_with_penalties_waits_for_its_token() -> None:
    params = SamplingParams(temperature=0, max_tokens=9, presence_penalty=1)
    state, _ = prefilled(request(0, [1, 2], params), request(1, [1], GREEDY))
    _, second = schedule(state)
    assert second.sample_arrivals.tolist() == [1]


def test_a_token_that_the_step_before_did_not_sample_is_waited_for() -> None:
    """The device has the tokens of one step only."""
    state, _ = prefilled(request(0, [1], GREEDY), request(1, [2], GREEDY))
    two_late = attrs.evolve(LIMITS, lookahead=2)
    only_the_first = attrs.evolve(two_late, max_batched_tokens=1)
    state, second = schedule(attrs.evolve(state, limits=only_the_first))
    assert second.sample_arrivals.tolist() == [0]
    _, third = schedule(attrs.evolve(state, limits=two_late))
    assert (third.sample_arrivals.tolist(), third.starts.tolist()) == ([0], [2])


def test_a_token_is_taken_only_by_the_sample_that_waits_for_it() -> None:
    state, plan = prefilled(request(0, [1, 2], attrs.evolve(GREEDY, n=2)))
    assert plan.sample_numbers.tolist() == [0, 1]
    twin = attrs.evolve(plan, sample_rows=plan.sample_rows[::-1].copy())
    _, output = commit(state, twin, sampled(3, 4))
    assert not len(output.tokens)
    shifted = attrs.evolve(plan, sample_positions=plan.sample_positions + 1)
    assert not len(commit(state, shifted, sampled(3, 4))[1].tokens)
    other = attrs.evolve(plan, sample_arrivals=plan.sample_arrivals + 1)
    assert not len(commit(state, other, sampled(3, 4))[1].tokens)
    after, output = commit(state, plan, sampled(3, 4))
    assert output.tokens.tolist() == [3, 4]
    assert not len(commit(after, plan, sampled(3, 4))[1].tokens)  # they have come already


def test_a_preempted_row_placed_again_takes_no_token_before_its_prompt_is_planned() -> None:
    state, plan = prefilled(request(0, [1, 2, 3, 1, 2], GREEDY))
    slow = attrs.evolve(LIMITS, max_batched_tokens=2, prefix_caching=False)
    state = attrs.evolve(preempt(state, 0), limits=slow)
    state, chunk = schedule(state)
    assert (chunk.counts.tolist(), len(chunk.sample_rows)) == ([2], 0)
    state, output = commit(state, plan, sampled(3))
    assert not len(output.tokens) and token_ids(state.rows, 0).tolist() == [1, 2, 3, 1, 2]
    check(state)


def test_a_fork_of_a_row_that_waits_has_its_known_tokens_and_samples_for_itself() -> None:
    state, plan = prefilled(request(0, [1, 2], GREEDY))
    state, (twin,) = fork(state, 0)
    check(state)
    state, second = schedule(state)
    assert second.rows.tolist() == [0, twin]
    assert (second.starts.tolist(), second.token_sources.tolist()) == ([2, 1], [0, -1])
    state, output = commit(state, plan, sampled(5))
    assert (output.samples.tolist(), output.tokens.tolist()) == ([0], [5])
    state, output = commit(state, second, sampled(6, 5))
    assert [token_ids(state.rows, row).tolist() for row in (0, twin)] == [[1, 2, 5, 6], [1, 2, 5]]


def test_scores_of_a_row_that_is_gone_are_passed_over() -> None:
    params = attrs.evolve(GREEDY, prompt_logprobs=1)
    state, plan = prefilled(request(0, [1, 2, 3], params))
    batch, draw = pack(state, plan)
    logits, _ = toy_forward(LIMITS)(None, ToyKV.empty(LIMITS), batch)
    found = toy_sample(logits, draw)
    assert [position for _, position, _ in commit(state, plan, found)[1].scores] == [1, 2]
    _, output = commit(vacate(state, [0]), plan, found)
    assert (output.scores, len(output.tokens)) == ([], 0)


def test_a_sample_is_named_the_same_in_the_queue_and_in_a_row() -> None:
    state, plan = prefilled(request(0, [1, 2], GREEDY), request(1, [1, 3], GREEDY))
    assert len(running(state.rows)) == 2
    state = preempt(state, 1)
    assert [entry.id for entry in state.waiting] == [SampleId(arrival=1, sample=0)]
