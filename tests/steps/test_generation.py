"""State and cache belong together: an old state is continued on the cache it was made for, or from
cold(), or not at all."""

import pickle
import subprocess
import sys
from collections import Counter

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nva.state.engine import check, empty, is_busy
from nva.state.generation import COLD
from nva.state.limits import Limits
from nva.state.media import Placed, image, media
from nva.state.plan import Sampled
from nva.state.policy import POLICIES
from nva.state.request import SamplingParams, request
from nva.state.rows import running
from nva.steps.allocate import fork
from nva.steps.apply import abort
from nva.steps.commit import commit
from nva.steps.recover import cold
from nva.steps.schedule import schedule
from nva.steps.submit import submit
from nva.testing import Fail, Run, Step, Steps, ToyKV, events, fold, limits, policies
from nva.testing.folds import apply, check_tokens, finish

GREEDY = SamplingParams(temperature=0, max_tokens=6)
LIMITS = Limits(vocab_size=7, max_model_len=32, n_blocks=8, block_size=2, max_rows=3)


def test_an_old_state_goes_on_with_the_right_tokens_or_is_refused() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=max(150, settings().max_examples), derandomize=True)
    @given(st.data(), policies(), st.booleans())
    def holds(data, policy, is_late):
        size = data.draw(limits(lookahead=int(is_late)))
        # Poison is written by the test, beside any step: the old states' blocks stay as they are.
        cache = ToyKV.empty(size)
        run = Run(state=empty(size, policy), kv=cache, is_late=is_late, is_poisoned=False)
        moments = []
        for event in data.draw(events(size)):
            moments.append((run.state, run.computed, list(run.requests)))
            apply(run, event, Steps())
        if not moments:
            return
        state, computed, requests = data.draw(st.sampled_from(moments))
        again = Run(state=state, kv=run.kv, is_late=is_late, computed=computed, requests=requests)
        try:
            finish(again, Steps())
            seen["continued"] += bool(again.plans)
        except ValueError as error:
            assert "another moment of the KV cache" in str(error) and "cold(state)" in str(error)
            again.state, again.computed = cold(state), computed
            check(again.state)
            assert not len(running(again.state.rows)) and not len(again.state.blocks.index)
            finish(again, Steps())
            seen["refused, then cold"] += bool(again.plans)
        for found in again.finished:
            check_tokens(found, size)

    holds()
    assert seen["continued"] and seen["refused, then cold"], seen


def stepped(state, kv):
    run = Run(state=state, kv=kv)
    apply(run, Step(), Steps())
    return run.state, run.kv


def two_branches():
    """Two states of as many steps each, made of one state and over one cache."""
    start, kv = stepped(submit(empty(LIMITS), [request(0, [1, 2, 3], GREEDY)]), ToyKV.empty(LIMITS))
    branches = [submit(start, [request(1, [1, 2, token], GREEDY)]) for token in (1, 2)]
    return kv, branches


def test_two_branches_of_one_state_are_told_apart() -> None:
    kv, (one, other) = two_branches()
    after_one, kv_of_one = stepped(one, attrs.evolve(kv, tokens=kv.tokens.copy()))
    after_other, kv_of_other = stepped(other, kv)
    assert len({after_one.generation, after_other.generation, other.generation}) == 3
    for state in (one, other, after_other):
        with pytest.raises(ValueError, match="another moment of the KV cache"):
            stepped(state, kv_of_one)
    stepped(cold(after_other), kv_of_one)
    stepped(after_other, kv_of_other)


def test_an_empty_state_fits_any_cache_and_leaves_a_generation_of_its_own() -> None:
    state, kv = stepped(submit(empty(LIMITS), [request(0, [1], GREEDY)]), ToyKV.empty(LIMITS))
    again, used = stepped(submit(empty(LIMITS), [request(0, [2], GREEDY)]), kv)
    assert COLD not in (state.generation, again.generation) and state.generation != again.generation
    assert (kv.generation, used.generation) == (state.generation, again.generation)


def test_a_failed_step_leaves_state_and_cache_together() -> None:
    kv, (state, _) = two_branches()
    run = Run(state=state, kv=kv)
    apply(run, Fail(), Steps())
    assert run.state.generation == run.kv.generation != state.generation
    finish(run, Steps())


def test_a_state_from_before_a_failed_step_does_not_fit_what_that_step_wrote() -> None:
    """It would find a block by its tokens that the failed step has overwritten."""
    run = Run(state=submit(empty(LIMITS), [request(0, [1, 2, 3], GREEDY)]), kv=ToyKV.empty(LIMITS))
    finish(run, Steps())
    old = submit(run.state, [request(1, [1, 2, 3], GREEDY)])
    run.state = submit(run.state, [request(2, list(range(4)) * 3, GREEDY)])
    apply(run, Fail(), Steps())
    with pytest.raises(ValueError, match="another moment of the KV cache"):
        stepped(old, run.kv)
    finish(run, Steps())


def test_whatever_comes_in_makes_another_generation() -> None:
    """What was submitted, sampled, aborted and forked is told apart, also where the plan is not."""

    def after(*changes):
        state, kv = stepped(submit(empty(LIMITS), [request(0, [1, 2], GREEDY)]), KV())
        for change in changes:
            state = change(state)
        return schedule(state)[0].generation

    def KV():
        return ToyKV.empty(LIMITS)

    def seen(start, value):
        placed = Placed(image=image(np.full((2, 1), value, np.float32), 1, 2), start=start)
        return media([placed], 3)

    def adding(prompt, **fields):
        return lambda state: submit(state, [request(1, prompt, GREEDY, **fields)])

    variants = [
        (),
        (adding([1]),),
        (adding([2]),),
        (adding([1, 1, 1]),),
        (adding([1, 1, 1], media=seen(0, 1)),),
        (adding([1, 1, 1], media=seen(1, 1)),),
        (adding([1, 1, 1], media=seen(0, 2)),),
        (lambda state: fork(state, 0)[0],),
        (lambda state: abort(state, [0])[0], adding([1])),
        (adding([1]), lambda state: abort(state, [1])[0], adding([1])),
    ]
    assert len({after(*changes) for changes in variants}) == len(variants)
    assert after(*variants[1]) == after(*variants[1])


def test_other_tokens_make_another_generation() -> None:
    state, plan = schedule(submit(empty(LIMITS), [request(0, [1, 2], GREEDY)]))

    def after(token, is_finite=True):
        given = Sampled(tokens=np.array([token], np.int32), is_finite=np.array([is_finite]))
        return commit(state, plan, given)[0]

    assert schedule(after(1))[0].generation != schedule(after(2))[0].generation
    assert after(1).history != after(1, is_finite=False).history


def test_generations_are_the_same_in_every_process() -> None:
    code = (
        "from tests.steps.test_generation import *; kv, (one, _) = two_branches(); "
        "print(stepped(one, kv)[0].generation.hex())"
    )
    kv, (one, _) = two_branches()
    found = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        for _ in range(2)
    ]
    assert found == [stepped(one, kv)[0].generation.hex()] * 2


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest"])
def test_a_state_can_be_pickled_and_goes_on(policy) -> None:
    kv = ToyKV.empty(LIMITS)
    requests = [request(i, [1, 2, i], attrs.evolve(GREEDY, logit_bias={5: 1})) for i in range(5)]
    old = state = submit(empty(LIMITS, POLICIES[policy]), requests)
    for _ in range(4):
        state, kv = stepped(state, kv)
    copy = pickle.loads(pickle.dumps(state))
    assert len(pickle.loads(pickle.dumps(old)).waiting) == 5
    check(copy)
    results = []
    for each in (state, copy):
        run = Run(state=each, kv=ToyKV(tokens=kv.tokens.copy(), generation=kv.generation))
        run.requests = list(requests)
        finish(run, Steps())
        results.append([(found.request.id, found.token_ids) for found in run.finished])
    assert results[0] == results[1] and not is_busy(run.state)


def test_a_fold_ends_on_the_newest_generation() -> None:
    run = fold([], LIMITS)
    assert run.state.generation == run.kv.generation == COLD
