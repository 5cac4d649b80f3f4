"""Beam search from fork: rows that share a past share its blocks, and a block is copied only when
two write to it.

    python examples/beam_search.py "The sea is" --beams 4 --max-tokens 24 [--model FOLDER]

A beam is a row. Each step scores every continuation of every row and keeps the best: a row with two
children forks, a row without any ends. It is the engine's own step with another `commit`, which
reads the logits that an observer kept; see compose.py for the loop."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

import nva
from nva.loop import step
from nva.state.engine import EngineState, is_busy
from nva.state.limits import blocks_for
from nva.state.plan import Output, Plan, Sampled
from nva.state.request import request
from nva.state.rows import Rows, token_ids
from nva.steps.allocate import duplicate, vacate
from nva.steps.apply import abort
from nva.steps.commit import commit
from nva.steps.submit import submit

REQUEST_ID = "beam search"


@attrs.frozen(kw_only=True)
class Beam:
    """A way to go on: after this row comes this token, and the row's output then has this
    log-probability."""

    row: int
    token: int
    score: float


@attrs.frozen(kw_only=True)
class Answer:
    """An output that ended, stop token included. Its score: log-probability / length **
    length_penalty."""

    score: float
    token_ids: tuple[int, ...]


@attrs.frozen(kw_only=True)
class Search:
    """Where a search stands: its live rows, and the best answers so far."""

    n_beams: int
    length_penalty: float
    stop_ids: frozenset[int]
    scores: dict[int, float] = attrs.field(factory=dict)  # row -> log-probability of its output
    answers: tuple[Answer, ...] = ()  # best first, at most n_beams
    is_over: bool = False


def beam_search(
    engine: nva.Engine,
    prompt: Sequence[int],
    n_beams: int,
    max_tokens: int = 64,
    length_penalty: float = 1.0,
) -> tuple[Answer, ...]:
    """The best answers to a prompt of token ids, best first. Raises ValueError if the engine can't
    hold the beams."""
    search = begin(engine, prompt, n_beams, max_tokens, length_penalty)
    try:
        while not search.is_over:
            search = advance(engine, search)
    finally:
        engine.state, _ = abort(engine.state, [REQUEST_ID])
    return search.answers


def begin(
    engine: nva.Engine,
    prompt: Sequence[int],
    n_beams: int,
    max_tokens: int,
    length_penalty: float = 1.0,
) -> Search:
    """Queue the prompt. All beams must fit at once: one that is preempted would miss a step of the
    others."""
    limits = engine.state.limits
    n_blocks = n_beams * blocks_for(len(prompt) + max_tokens, limits.block_size)
    if is_busy(engine.state):
        raise ValueError(
            "the engine serves other requests; give beam search an engine that is idle"
        )
    if not -9 <= length_penalty <= 9:
        raise ValueError(f"length_penalty is {length_penalty}; give a number in [-9, 9]")
    if (
        not 1 <= n_beams <= min(limits.max_rows, limits.max_batched_tokens)
        or n_blocks > limits.n_blocks
    ):
        raise ValueError(
            f"{n_beams} beams need that many rows and tokens a step, and up to {n_blocks} blocks; "
            "the engine has "
            f"{limits.max_rows} rows, {limits.max_batched_tokens} tokens and {limits.n_blocks} "
            "blocks"
        )
    params = nva.SamplingParams(temperature=0, max_tokens=max_tokens)
    engine.state = submit(engine.state, [request(REQUEST_ID, prompt, params)])
    return Search(n_beams=n_beams, length_penalty=length_penalty, stop_ids=engine.eos_ids)


def advance(engine: nva.Engine, search: Search) -> Search:
    """One step of the engine: every row grows by a token, or a chunk of the prompt is computed."""
    seen: dict[str, Any] = {}

    def observe(part: str, result: Any) -> Any:
        seen[part] = result
        return result

    def commit_beams(state: EngineState, plan: Plan, _: Sampled) -> tuple[EngineState, Output]:
        """Take in the beams' tokens, in the place of those that were sampled."""
        (_, draw), (logits, _) = seen["pack"], seen["forward"]
        beams: list[Beam] = []
        after = search
        if len(plan.sample_rows):
            logprobs = logits[draw.logit_rows.tolist()].log_softmax(-1)
            after, beams = select(search, state, plan, logprobs)
        state, plan = reorder(state, plan, [beam.row for beam in beams])
        scores = dict(zip(plan.sample_rows.tolist(), (b.score for b in beams), strict=True))
        seen["search"] = attrs.evolve(after, scores=scores)
        tokens = np.array([beam.token for beam in beams], np.int32)
        is_finite = np.ones(len(beams), np.bool_)
        return commit(state, plan, Sampled(tokens=tokens, is_finite=is_finite))

    steps = attrs.evolve(engine.steps, commit=commit_beams)
    engine.state, engine.kv, _ = step(
        steps, engine.forward, engine.params, engine.state, engine.kv, observe
    )
    return seen["search"]


def select(
    search: Search, state: EngineState, plan: Plan, logprobs: Tensor
) -> tuple[Search, list[Beam]]:
    """The next beams, given log-probabilities [S, V] of the tokens after each row that samples.

    Of the n_beams best continuations, those that end become answers; the n_beams best that don't
    are the beams. A row can end in as many ways as there are stop ids, so this many continuations
    always hold enough that go on."""
    rows, row_ids = state.rows, plan.sample_rows.tolist()
    is_last = bool((rows.n_tokens[row_ids] == rows.max_len[row_ids]).any())  # none may go on
    totals = logprobs + torch.tensor([search.scores.get(row, 0.0) for row in row_ids])[:, None]
    n_wanted = min((1 + max(1, len(search.stop_ids))) * search.n_beams, totals.numel())
    best = zip(*(values.tolist() for values in totals.flatten().topk(n_wanted)), strict=True)
    places = [(score, *divmod(index, totals.shape[1])) for score, index in best]
    found = [Beam(row=row_ids[j], token=token, score=score) for score, j, token in places]
    is_end = [is_last or beam.token in search.stop_ids for beam in found]
    ended = [
        answer(search, rows, found[i]) for i in range(min(search.n_beams, len(found))) if is_end[i]
    ]
    beams = [beam for beam, ends in zip(found, is_end, strict=True) if not ends][: search.n_beams]
    return settle(
        search, ended, beams, n_output=int((rows.n_tokens - rows.n_prompt)[row_ids[0]])
    ), beams


def answer(search: Search, rows: Rows, beam: Beam) -> Answer:
    """The answer that this beam is, if it ends."""
    output = (*token_ids(rows, beam.row)[rows.n_prompt[beam.row] :].tolist(), beam.token)
    return Answer(score=beam.score / len(output) ** search.length_penalty, token_ids=output)


def settle(search: Search, ended: list[Answer], beams: list[Beam], n_output: int) -> Search:
    """Keep the best answers. It is over once there are enough and the best beam, ended now, would
    not be among them."""
    answers = sorted([*search.answers, *ended], key=lambda found: -found.score)[: search.n_beams]
    is_full = len(answers) == search.n_beams
    is_over = not beams or (
        is_full and beams[0].score / n_output**search.length_penalty <= answers[-1].score
    )
    return attrs.evolve(search, answers=tuple(answers), is_over=is_over)


def reorder(state: EngineState, plan: Plan, parents: Sequence[int]) -> tuple[EngineState, Plan]:
    """Let the rows that sample go on as these parents' children: the first child of a row is the
    row itself, others are forks of it, and rows without children end. The plan then samples for the
    children, in the order of `parents`."""
    sampling = plan.sample_rows.tolist()
    state = vacate(state, [row for row in sampling if row not in parents])
    children: list[int] = []
    for parent in parents:
        state, (child,) = duplicate(state, parent) if parent in children else (state, [parent])
        children.append(child)
    return state, attrs.evolve(
        plan,
        sample_rows=np.array(children, np.int32),
        sample_sources=plan.sample_sources[[sampling.index(parent) for parent in parents]],
        sample_arrivals=state.rows.arrival[children],
        sample_numbers=state.rows.sample[children],
        sample_positions=state.rows.n_known[children],
    )


def main() -> None:
    """Search from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt")
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument(
        "--length-penalty", type=float, default=1.0, help="above 1 favours long answers"
    )
    parser.add_argument("--model", help="folder or hub id; the demo model by default")
    args = parser.parse_args()
    try:
        engine = nva.load(args.model, max_rows=args.beams, max_model_len=512)
        prompt = engine.tokenizer.encode(args.prompt)
        answers = beam_search(engine, prompt, args.beams, args.max_tokens, args.length_penalty)
    except ValueError as error:
        parser.error(str(error))
    for found in answers:
        print(
            f"{found.score:8.3f}  "
            f"{args.prompt}{engine.tokenizer.decode(found.token_ids, skip_special_tokens=True)}"
        )


if __name__ == "__main__":
    main()
