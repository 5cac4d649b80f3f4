"""The same engine once more, with mutable lists and dicts, one sequence at a time: slow, plain, a
second opinion.

It decides what the pure steps must decide: who computes how many tokens, who is preempted, what the
cache gives."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from nva.state.limits import Limits, blocks_for
from nva.state.policy import Policy
from nva.state.request import Request
from nva.state.rows import SampleId
from nva.testing.toy import toy_stop, toy_tokens


@attrs.define(kw_only=True, eq=False)
class Block:
    """A block: how many tables hold it, and what it is found by: the publication before it, and its
    own tokens."""

    holders: int = 0
    key: tuple[object, tuple[int, ...]] | None = None
    publication: object = None


@attrs.define(kw_only=True, eq=False)
class Sequence_:
    """One sample, or n of them until the prompt is computed."""

    request: Request
    order: tuple[float, int, int]
    tokens: list[int]
    n_samples: int
    n_computed: int = 0
    n_keyed: int = 0
    publication: object = None  # of its last keyed block
    table: list[Block] = attrs.field(factory=lambda: [])

    id = property(lambda self: SampleId(self.order[1], self.order[2]))
    n_due = property(lambda self: len(self.tokens) - self.n_computed)
    is_scored = property(
        lambda self: (
            self.request.params.prompt_logprobs is not None
            and len(self.tokens) == len(self.request.prompt)
        )
    )


@attrs.define(kw_only=True)
class Decisions:
    """What one step did, by the SampleId of each sequence."""

    # id: (start, count)
    computed: dict[SampleId, tuple[int, int]] = attrs.field(factory=lambda: {})
    preempted: list[SampleId] = attrs.field(factory=lambda: [])
    n_copied: int = 0
    n_hit: int = 0


class ReferenceEngine:
    """submit(), step() and abort(), each in place."""

    def __init__(self, limits: Limits, policy: Policy) -> None:
        self.limits, self.policy, self.policy_state = limits, policy, policy.init()
        self.n_arrived = 0
        self.waiting: list[Sequence_] = []
        self.running: list[Sequence_] = []
        self.free = [Block() for _ in range(limits.n_blocks)]  # front first
        self.found: dict[object, Block] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.policy_state, rank = self.policy.step(self.policy_state, request, self.n_arrived)
            order, prompt = (rank, self.n_arrived, 0), request.prompt.tolist()
            self.waiting.append(
                Sequence_(request=request, order=order, tokens=prompt, n_samples=request.params.n)
            )
            self.n_arrived += 1

    def abort(self, request_id: int | str) -> None:
        self._leave([s for s in self.running if s.request.id == request_id])
        self.waiting = [s for s in self.waiting if s.request.id != request_id]

    def step(self) -> Decisions:
        done, left, scores = (
            Decisions(),
            self.limits.max_batched_tokens,
            self.limits.max_scored_tokens,
        )
        self.running.sort(key=lambda s: s.order)
        decoding = [s for s in self.running if s.n_due == 1][:left]
        prefilling = [s for s in self.running if s.n_due > 1]
        while sum(self._growth(decoding)) > len(self.free):
            victim = max(self.running, key=lambda s: s.order)
            done.preempted.append(victim.id)
            self._leave([victim])
            victim.n_computed, victim.n_keyed, victim.publication = 0, 0, None
            self.waiting.append(victim)
            decoding = [s for s in decoding if s is not victim]
        for sequence, grows in zip(decoding, self._growth(decoding), strict=True):
            done.n_copied += self._grow(sequence) if grows else 0
        for sequence in decoding:
            self._compute(sequence, 1, done)
        left -= len(decoding)
        for sequence in [s for s in prefilling if s in self.running]:
            n = min(sequence.n_due, left, scores if sequence.is_scored else left)
            left, scores = left - n, scores - n * sequence.is_scored
            self._compute(sequence, n, done)
        self.waiting.sort(key=lambda s: s.order)
        while self.waiting and left:
            sequence = self.waiting[0]
            if (sequence.is_scored and not scores) or not self._admit(sequence, done):
                break
            n = min(sequence.n_due, left, scores if sequence.is_scored else left)
            left, scores = left - n, scores - n * sequence.is_scored
            self._compute(sequence, n, done)
        by_id = {sequence.id: sequence for sequence in self.running}
        sampling = [by_id[id_] for id_ in done.computed if not by_id[id_].n_due]
        sampling += [fork for sequence in sampling for fork in self._forks(sequence)]
        self._leave([sequence for sequence in sampling if self._ends(sequence)])
        for sequence in [s for s in sampling if s in self.running and self._is_stopped(s)]:
            self._leave([sequence])
        return done

    def _is_stopped(self, sequence: Sequence_) -> bool:
        """Whether its text holds a stop string."""
        output = sequence.tokens[len(sequence.request.prompt) :]
        return toy_stop(output, sequence.request.params.stop) is not None

    def _growth(self, decoding: list[Sequence_]) -> list[bool]:
        """Who needs a block: its table is full, or others hold its open block and no one before it
        keeps that one."""
        grows, kept = [], list[Block]()
        for sequence in decoding:
            index = sequence.n_computed // self.limits.block_size
            if index == len(sequence.table):
                grows.append(True)
                continue
            block = sequence.table[index]
            wanting = [s for s in decoding if index < len(s.table) and s.table[index] is block]
            may_keep = len(wanting) == block.holders and not any(other is block for other in kept)
            kept += [block] if may_keep else []
            grows.append(block.holders > 1 and not may_keep)
        return grows

    def _grow(self, sequence: Sequence_) -> int:
        index = sequence.n_computed // self.limits.block_size
        block = self._take()
        if index == len(sequence.table):
            sequence.table.append(block)
            return 0
        self._drop([sequence.table[index]])
        sequence.table[index] = block
        return 1

    def _take(self) -> Block:
        block = self.free.pop(0)
        if block.key is not None:
            del self.found[block.key]
        block.key, block.holders = None, 1
        return block

    def _drop(self, table: list[Block]) -> None:
        for block in table:
            block.holders -= 1
        for block in reversed(dict.fromkeys(table)):
            if not block.holders:
                self.free.insert(0 if block.key is None else len(self.free), block)

    def _leave(self, sequences: list[Sequence_]) -> None:
        """Release the tables, as one that is read from its end: what several share is freed
        last."""
        self._drop([block for sequence in sequences for block in sequence.table])
        for sequence in sequences:
            sequence.table = []
            self.running.remove(sequence)

    def _compute(self, sequence: Sequence_, n: int, done: Decisions) -> None:
        if n:
            done.computed[sequence.id] = (sequence.n_computed, n)
        sequence.n_computed += n
        size = self.limits.block_size
        while self.limits.prefix_caching and (sequence.n_keyed + 1) * size <= sequence.n_computed:
            block = sequence.table[sequence.n_keyed]
            sequence.n_keyed += 1
            key = (
                sequence.publication,
                tuple(sequence.tokens[(sequence.n_keyed - 1) * size : sequence.n_keyed * size]),
            )
            if key not in self.found:
                block.key, block.publication, self.found[key] = key, object(), block
            sequence.publication = self.found[key].publication

    def _admit(self, sequence: Sequence_, done: Decisions) -> bool:
        size = self.limits.block_size
        if sum(s.n_samples for s in self.running) + sequence.n_samples > self.limits.max_rows:
            return False
        hits: list[Block] = []
        while (
            self.limits.prefix_caching
            and not sequence.is_scored
            and len(hits) < (len(sequence.tokens) - 1) // size
        ):
            own = tuple(sequence.tokens[len(hits) * size : (len(hits) + 1) * size])
            block = self.found.get((hits[-1].publication if hits else None, own))
            if block is None:
                break
            hits.append(block)
        n_new = blocks_for(len(sequence.tokens), size) - len(hits)
        if n_new + sum(not block.holders for block in hits) + len(self.running) > len(self.free):
            return False
        for block in hits:
            self.free = [other for other in self.free if other is not block]
            block.holders += 1
        sequence.table = hits + [self._take() for _ in range(n_new)]
        sequence.n_keyed, sequence.n_computed = len(hits), len(hits) * size
        sequence.publication = hits[-1].publication if hits else None
        done.n_hit += sequence.n_computed
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return True

    def _forks(self, sequence: Sequence_) -> list[Sequence_]:
        """The other samples that start where this sequence's prompt ends."""
        forks: list[Sequence_] = []
        for sample in range(1, sequence.n_samples):
            order = (*sequence.order[:2], sequence.order[2] + sample)
            copies = {"tokens": list(sequence.tokens), "table": list(sequence.table)}
            forks.append(attrs.evolve(sequence, order=order, n_samples=1, **copies))
            for block in sequence.table:
                block.holders += 1
        sequence.n_samples = 1
        self.running += forks
        return forks

    def _ends(self, sequence: Sequence_) -> bool:
        """Add the next token; whether the sequence ends with it."""
        request, limits = sequence.request, self.limits
        (token,) = toy_tokens(sequence.tokens, 1, limits.vocab_size)
        n_output = len(sequence.tokens) - len(request.prompt)
        if n_output < request.params.min_tokens and token in request.stop_ids:
            token = next(
                other for other in range(limits.vocab_size) if other not in request.stop_ids
            )
        sequence.tokens.append(token)
        longest = min(
            limits.max_model_len,
            limits.pool_len,
            len(request.prompt) + (request.params.max_tokens or 0),
        )
        return token in request.stop_ids or len(sequence.tokens) >= longest
