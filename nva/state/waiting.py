"""The sequences that wait for a row, in the order in which they will get one.

The law: taking the first, adding one and removing one cost the same however many wait. Read next:
engine.py; steps/submit.py, which adds to the queue; steps/schedule.py, which takes from it."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

import attrs

from nva.state.columns import Int, array_field
from nva.state.lookup import Lookup
from nva.state.request import Request
from nva.state.rows import SampleId

Order = tuple[float, int, int]  # rank, arrival, sample

CHUNK = 256
"""Entries of a chunk, once it was cut: a change copies one chunk and the tuple of chunks."""


@attrs.frozen(kw_only=True)
class Waiting:
    """A sequence that holds no row: a request that has not started, or a row that was preempted."""

    request: Request
    tokens: Int = array_field()  # prompt and output so far
    sample: int
    n_samples: int
    arrival: int
    rank: float
    n_cached: int | None = None  # None until first admitted

    @property
    def n_known(self) -> int:
        return len(self.tokens)

    @property
    def order(self) -> Order:
        return (self.rank, self.arrival, self.sample)

    @property
    def id(self) -> SampleId:
        return SampleId(self.arrival, self.sample)


Chunk = tuple[Waiting, ...]


def _no_orders() -> Lookup[int | str, tuple[Order, ...]]:
    return Lookup()


@attrs.frozen
class Queue:
    """Waiting sequences in ascending order, as a value: a tuple of short tuples, so that a new
    version shares all chunks but one with the old (a B-tree of two levels)."""

    chunks: tuple[Chunk, ...] = ()  # none is empty
    n: int = 0
    # By request id, the orders of its entries.
    orders: Lookup[int | str, tuple[Order, ...]] = attrs.field(factory=_no_orders, eq=False)

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Waiting]:
        return chain.from_iterable(self.chunks)


def queue_of(entries: Iterable[Waiting]) -> Queue:
    """A queue of these entries, given in any order."""
    ordered = sorted(entries, key=_order)
    orders: dict[int | str, tuple[Order, ...]] = {}
    for entry in ordered:
        orders[entry.request.id] = (*orders.get(entry.request.id, ()), entry.order)
    starts = range(0, len(ordered), CHUNK)
    chunks = tuple(tuple(ordered[start : start + CHUNK]) for start in starts)
    return Queue(chunks, len(ordered), Lookup(orders))


def first(queue: Queue) -> Waiting:
    """The next to get a row."""
    return queue.chunks[0][0]


def without_first(queue: Queue) -> Queue:
    """The queue from its second entry on."""
    return without_entry(queue, first(queue))


def queued(queue: Queue, entries: Sequence[Waiting]) -> Queue:
    """The queue with more entries, each where its order puts it."""
    if 8 * len(entries) > queue.n:  # sorting all is faster than finding each one's place
        return queue_of([*queue, *entries])
    for entry in entries:
        queue = _with(queue, entry)
    return queue


def without(queue: Queue, ids: Collection[int | str]) -> tuple[Queue, list[Waiting]]:
    """The queue without the entries of these requests, and those, in order."""
    orders = chain.from_iterable(queue.orders.among(ids).values())
    removed = [_found(queue, order) for order in sorted(orders)]
    for entry in removed:
        queue = without_entry(queue, entry)
    return queue, removed


def waiting_of(queue: Queue, id_: int | str, sample: int) -> Waiting | None:
    """The entry of a request that begins with this sample, None if there is none."""
    for order in queue.orders.get(id_) or ():
        if order[2] == sample:
            return _found(queue, order)
    return None


def _order(entry: Waiting) -> Order:
    return entry.order


def _where(queue: Queue, order: Order) -> tuple[int, int]:
    """The chunk that has or would get an entry of this order, and its index there."""
    after = bisect.bisect_right(queue.chunks, order, key=lambda chunk: chunk[0].order)
    at = max(0, after - 1)
    return at, bisect.bisect_left(queue.chunks[at], order, key=_order)


def _found(queue: Queue, order: Order) -> Waiting:
    at, index = _where(queue, order)
    return queue.chunks[at][index]


def _with(queue: Queue, entry: Waiting) -> Queue:
    at, index = _where(queue, entry.order)
    chunk = queue.chunks[at]
    chunk = (*chunk[:index], entry, *chunk[index:])
    half = len(chunk) // 2
    cut = (chunk,) if len(chunk) <= 2 * CHUNK else (chunk[:half], chunk[half:])
    orders = (*(queue.orders.get(entry.request.id) or ()), entry.order)
    return _changed(queue, at, cut, entry, orders, queue.n + 1)


def without_entry(queue: Queue, entry: Waiting) -> Queue:
    """The queue without this entry of it."""
    at, index = _where(queue, entry.order)
    chunk = queue.chunks[at]
    chunk = chunk[:index] + chunk[index + 1 :]
    orders = tuple(each for each in queue.orders[entry.request.id] if each != entry.order)
    return _changed(queue, at, (chunk,) if chunk else (), entry, orders, queue.n - 1)


def _changed(
    queue: Queue,
    at: int,
    chunks: tuple[Chunk, ...],
    entry: Waiting,
    orders: tuple[Order, ...],
    n: int,
) -> Queue:
    """The queue with these chunks in the place of chunk `at`, and these orders of the entry's
    request."""
    return Queue(
        (*queue.chunks[:at], *chunks, *queue.chunks[at + 1 :]),
        n,
        queue.orders.updated({entry.request.id: orders or None}),
    )
