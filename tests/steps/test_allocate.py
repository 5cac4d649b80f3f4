"""The free queue, and forks: which blocks come next, and who may write what."""

import attrs
import numpy as np
import pytest

from nva.state.blocks import Found, Key, empty_blocks, free_ids
from nva.state.engine import check, empty, is_busy
from nva.state.errors import InvariantError
from nva.state.limits import Limits
from nva.state.policy import by_priority
from nva.state.request import SamplingParams, request
from nva.state.rows import block_table, running, token_ids
from nva.steps.allocate import fork, release, share, take, vacate
from nva.steps.apply import abort
from nva.steps.commit import commit
from nva.steps.pack import pack
from nva.steps.recover import withdraw
from nva.steps.schedule import schedule
from nva.steps.submit import submit
from nva.testing import toy_sample, toy_tokens
from nva.testing.toy import ToyKV, toy_forward

LIMITS = Limits(vocab_size=7, max_model_len=32, n_blocks=6, block_size=4, max_rows=3)


def with_key(blocks, block: int, name: int):
    """The blocks, one of them found under a key."""
    key = Key(0, bytes([name]))
    index, keys = blocks.index.updated({key: Found(block, name)}), blocks.keys.updated({block: key})
    return attrs.evolve(blocks, index=index, keys=keys)


def test_blocks_are_taken_front_first_and_not_beyond_the_last() -> None:
    blocks, ids = take(empty_blocks(LIMITS), 2)
    assert (ids, free_ids(blocks)) == ([1, 2], [3, 4, 5, 6])
    blocks, ids = take(blocks, 4)
    assert (free_ids(blocks), blocks.n_free) == ([], 0)
    with pytest.raises(InvariantError, match="1 blocks taken of 0 free ones"):
        take(blocks, 1)


def test_unkeyed_blocks_are_reused_first_and_chains_from_their_end() -> None:
    blocks, ids = take(empty_blocks(LIMITS), 4)
    blocks = with_key(with_key(blocks, ids[0], 1), ids[1], 2)
    blocks = release(blocks, ids)
    assert free_ids(blocks) == [4, 3, 5, 6, 2, 1]


def test_a_found_block_leaves_the_queue_and_a_taken_one_is_found_no_more() -> None:
    blocks, ids = take(empty_blocks(LIMITS), 2)
    blocks = release(with_key(blocks, ids[0], 1), ids)
    held = share(blocks, [1])
    assert (free_ids(held), held.ref_counts[1]) == ([2, 3, 4, 5, 6], 1)
    taken, ids = take(blocks, 6)
    assert (ids[-1], len(taken.index), len(taken.keys)) == (1, 0, 0)


def stepped(state, kv):
    state, plan = schedule(state)
    batch, draw = pack(state, plan)
    logits, kv[0] = toy_forward(state.limits)(None, kv[0], batch)
    return *commit(state, plan, toy_sample(logits, draw)), plan


def test_a_fork_shares_all_blocks_and_copies_only_the_open_one() -> None:
    kv = [ToyKV.empty(LIMITS)]
    state = submit(
        empty(LIMITS), [request(0, [1, 2, 3, 4, 5], SamplingParams(temperature=0, max_tokens=9))]
    )
    state, _, _ = stepped(state, kv)
    (row,) = running(state.rows).tolist()
    state, (twin,) = fork(state, row)
    check(state)
    assert block_table(state.rows, twin).tolist() == block_table(state.rows, row).tolist()
    state, output, plan = stepped(state, kv)
    check(state)
    first, second = (block_table(state.rows, r).tolist() for r in (row, twin))
    assert first[0] == second[0] and first[1] != second[1]
    assert len(plan.copies) == 1
    assert token_ids(state.rows, row).tolist() == token_ids(state.rows, twin).tolist()
    assert output.samples.tolist() == [0, 1]


def test_forking_what_does_not_decode_or_fit_is_refused() -> None:
    state = submit(empty(LIMITS), [request(0, [1, 2], SamplingParams(temperature=0))])
    with pytest.raises(ValueError, match="row 0 is not running"):
        fork(state, 0)
    state, _, _ = stepped(state, [ToyKV.empty(LIMITS)])
    with pytest.raises(ValueError, match="3 forks asked, 2 rows free"):
        fork(state, 0, 3)


def test_vacating_returns_every_block() -> None:
    state = submit(empty(LIMITS), [request(0, [1, 2, 3, 4, 5], SamplingParams(temperature=0, n=3))])
    state, _, _ = stepped(state, [ToyKV.empty(LIMITS)])
    assert len(running(state.rows)) == 3
    state = vacate(state, running(state.rows).tolist())
    check(state)
    assert state.blocks.n_free == LIMITS.n_blocks


def test_abort_tells_the_tokens_so_far_of_every_sample() -> None:
    kv = [ToyKV.empty(LIMITS)]
    params = SamplingParams(temperature=0, n=2, max_tokens=9)
    state = submit(empty(LIMITS), [request(i, [1, 2], params) for i in "ab"])
    state, _, _ = stepped(state, kv)
    state, finished = abort(state, ["a", "b", "unknown"])
    assert [(end.request.id, end.sample, end.token_ids) for end in finished] == [
        ("b", 0, ()),
        ("b", 1, ()),
        ("a", 0, (5,)),
        ("a", 1, (5,)),
    ]
    assert np.all(~state.rows.is_running)


def test_submitting_is_all_or_nothing() -> None:
    state = empty(LIMITS)
    good, bad = request(0, [1]), request(1, [9])
    with pytest.raises(
        ValueError, match=r"request 1: the prompt has token id 9; the vocabulary is \[0, 7\)"
    ):
        submit(state, [good, bad])
    assert not state.waiting
    with pytest.raises(ValueError, match="request id 0 is in flight already"):
        submit(submit(state, [good]), [good])
    with pytest.raises(ValueError, match="at most 24 leave room"):
        submit(state, [request(0, [1] * 25)])


def test_rows_that_a_failed_step_preempted_stay_preempted() -> None:
    """Their blocks were taken and written by others before the step failed; whoever goes on must
    not read them."""
    limits = attrs.evolve(LIMITS, n_blocks=4, block_size=1, prefix_caching=False)
    kv, params = [ToyKV.empty(limits)], SamplingParams(temperature=0, max_tokens=4)
    state = submit(
        empty(limits, by_priority),
        [request(i, [i], attrs.evolve(params, priority=i)) for i in (1, 2)],
    )
    while state.blocks.n_free or len(running(state.rows)) < 2:
        state, _, _ = stepped(state, kv)
    planned, plan = schedule(state)
    assert plan.preempted
    toy_forward(limits)(None, kv[0], pack(planned, plan)[0])  # and now it fails
    state = withdraw(state, plan, pack(planned, plan)[0])
    kv[0] = attrs.evolve(kv[0], generation=state.generation)
    check(state)
    state, _ = abort(state, [1])
    finished = []
    while is_busy(state):
        state, output, _ = stepped(state, kv)
        finished += output.finished
    assert list(finished[0].token_ids) == toy_tokens([2], 4, limits.vocab_size)
