"""The queue is a sorted list as a value, whose changes cost the same however long it is."""

import time

import attrs
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nva.state import waiting
from nva.state.request import request
from nva.state.waiting import (
    CHUNK,
    Queue,
    Waiting,
    first,
    queue_of,
    queued,
    waiting_of,
    without,
    without_entry,
    without_first,
)

REQUESTS = [request(i, [1]) for i in range(9)]


def entry(arrival: int, rank: float = 0.0, sample: int = 0) -> Waiting:
    return Waiting(
        request=REQUESTS[arrival % 9],
        tokens=np.array([1], np.int32),
        sample=sample,
        n_samples=1,
        arrival=arrival,
        rank=rank,
    )


changes = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from("aaaaifr"), st.integers(0, 2), st.integers(1, 9))
)


@given(changes)
def test_every_version_stays_the_sorted_list_that_it_was(given_changes) -> None:
    """Versions in a tree: entries are added one by one or together, taken from the front, removed
    by their request."""
    waiting.CHUNK = 2  # so that chunks are cut and run empty
    try:
        versions, lists = [Queue()], [[]]
        n_arrived = 0
        for parent, kind, rank, n in given_changes:
            at = parent % len(versions)
            queue, expected = versions[at], list(lists[at])
            if kind in "ai":
                n = n if kind == "a" else 1
                new = [entry(n_arrived + i, float(rank - i % 2), sample=i) for i in range(n)]
                n_arrived += n
                queue = queued(queue, new)
                expected = sorted([*expected, *new], key=lambda each: each.order)
            elif kind == "f" and expected:
                assert first(queue) is expected[0]
                queue = without_first(queue)
                expected = expected[1:]
            elif kind == "r":
                queue, removed = without(queue, [n % 9, "unknown"])
                assert removed == [each for each in expected if each.request.id == n % 9]
                expected = [each for each in expected if each.request.id != n % 9]
            versions.append(queue)
            lists.append(expected)
            for each, content in zip(versions, lists, strict=True):
                assert list(each) == content and len(each) == len(content)
                assert bool(each) == bool(content) and all(each.chunks)
                for one in content:
                    assert waiting_of(each, one.request.id, one.sample).sample == one.sample
                assert waiting_of(each, "unknown", 0) is None
    finally:
        waiting.CHUNK = CHUNK


def test_one_of_a_requests_entries_leaves_and_the_others_stay() -> None:
    queue = queue_of([entry(4, sample=i) for i in range(3)])
    assert waiting_of(queue, 4, 1) is list(queue)[1]
    left = without_entry(queue, list(queue)[1])
    assert [each.sample for each in left] == [0, 2] and waiting_of(left, 4, 1) is None
    assert [each.sample for each in without(left, {4})[1]] == [0, 2]


def test_a_change_costs_the_same_in_a_long_queue() -> None:
    """The fastest of many, so that a busy machine doesn't matter; copying all would be 100 times
    slower in the longer one."""

    def fastest(n: int) -> float:
        requests = [request(i, [1]) for i in range(n + 60)]
        entries = [attrs.evolve(entry(i), request=each) for i, each in enumerate(requests)]
        queue = queue_of(entries[:n])
        taken = []
        for i in range(60):
            start = time.perf_counter()
            queue = queued(without_first(queue), [entries[n + i]])
            queue, _ = without(queue, [])
            taken.append(time.perf_counter() - start)
        return min(taken)

    assert fastest(100_000) < 8 * fastest(1_000)
