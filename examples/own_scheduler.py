"""A scheduler of one's own, served by nva.generate: answers don't stutter while a long prompt is
read.

    python examples/own_scheduler.py [--model FOLDER]

A scheduler is a pure function from a state to the next state and a plan. This one gives nva's own a
smaller budget in steps in which answers grow, so that no step is long. To test one, see
test_your_scheduler.py."""

from __future__ import annotations

import argparse
from typing import Any

import attrs

import nva
from nva.state.engine import EngineState
from nva.state.plan import Plan
from nva.steps.schedule import schedule

CHUNK = 16
"""Prompt tokens, at most, in a step in which answers grow."""


def gentle(state: EngineState) -> tuple[EngineState, Plan]:
    """nva's own schedule, with a budget of the decoding rows and a small chunk of prompts."""
    rows, limits = state.rows, state.limits
    is_decoding = rows.is_running & (rows.n_tokens - rows.n_computed == 1)
    n_decoding = int(is_decoding.sum())
    budget = limits.max_batched_tokens
    if n_decoding:
        budget = min(n_decoding + CHUNK, budget)
    smaller = attrs.evolve(limits, max_batched_tokens=budget)
    after, plan = schedule(attrs.evolve(state, limits=smaller))
    return attrs.evolve(after, limits=limits), plan


def largest_step(engine: nva.Engine, prompts: list[list[int]], max_tokens: int) -> int:
    """Answer the prompts, and give back the tokens computed in the largest step in which an answer
    that had begun grew."""
    sizes: list[int] = []

    def observe(part: str, result: Any) -> Any:
        if part == "schedule":
            _, plan = result
            is_decoding = (plan.counts == 1) & (plan.starts > 0)
            if is_decoding.any():
                sizes.append(plan.n_tokens)
        return result

    engine.observe = observe
    nva.generate(engine, prompts, nva.SamplingParams(temperature=0, max_tokens=max_tokens))
    return max(sizes)


def main() -> None:
    """Compare both schedulers on a short question, whose answer grows while a long prompt comes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub id; the demo model by default")
    args = parser.parse_args()
    for steps in (nva.Steps(), nva.Steps(schedule=gentle)):
        try:
            engine = nva.load(args.model, steps=steps, max_model_len=1024, max_batched_tokens=256)
        except ValueError as error:
            parser.error(str(error))
        short = engine.tokenizer.encode("The sea is")
        n_tokens = largest_step(engine, [short, short * 200], max_tokens=32)
        print(f"{steps.schedule.__name__}: steps of up to {n_tokens} tokens while an answer grows")


if __name__ == "__main__":
    main()
