"""Hypothesis strategies for limits, policies and lists of events. All small, so that pools run
short, prompts collide and budgets bind; shrinking leads to the shortest list of events that breaks
a law."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from nva.state.limits import Limits
from nva.state.policy import POLICIES, Policy
from nva.state.request import Request, SamplingParams, request
from nva.testing.actions import Abort, Arrive, Event, Fail, Fork, Step

VOCAB_SIZE = 7


@st.composite
def limits(draw: st.DrawFn, **fixed: object) -> Limits:
    """Limits small enough that everything runs short."""
    sizes: dict[str, Any] = {
        "block_size": draw(st.integers(1, 4)),
        "n_blocks": draw(st.integers(1, 12)),
        "max_rows": draw(st.integers(1, 5)),
        "max_batched_tokens": draw(st.integers(1, 9)),
        "max_scored_tokens": draw(st.integers(1, 3)),
        "max_model_len": draw(st.integers(6, 24)),
        "prefix_caching": draw(st.booleans()),
        **fixed,
    }
    buckets: dict[str, tuple[int, ...]] = {}
    if draw(st.booleans()):
        n_tokens = sizes["max_batched_tokens"]
        buckets = {
            "token_buckets": (3, n_tokens) if n_tokens > 3 else (n_tokens,),
            "row_buckets": tuple(sorted({2, sizes["max_rows"] + 1})),
        }
    return Limits(vocab_size=VOCAB_SIZE, **sizes, **buckets)


def policies() -> st.SearchStrategy[Policy]:
    """The policies of nva."""
    return st.sampled_from(list(POLICIES.values()))


@st.composite
def prompts(draw: st.DrawFn, max_len: int) -> list[int]:
    """Token ids; often the beginning of one common text, so that prefixes are shared."""
    common = [1, 2, 1, 1, 2, 2, 1, 2, 2, 2, 1, 1] * 2
    prefix = common[: draw(st.integers(0, max_len - 1))]
    most = max(1, min(4, max_len - len(prefix)))
    return prefix + draw(st.lists(st.integers(0, 2), min_size=1, max_size=most))


@st.composite
def requests(draw: st.DrawFn, id_: int, size: Limits) -> Request:
    """A request that fits the limits."""
    params = SamplingParams(
        temperature=0,
        max_tokens=draw(st.integers(1, 8)),
        min_tokens=draw(st.integers(0, 3)),
        n=draw(st.integers(1, min(3, size.max_rows))),
        priority=float(draw(st.integers(0, 2))),
        prompt_logprobs=draw(st.sampled_from([None, None, 1])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 1.0])),
        stop=draw(st.sampled_from([(), (), ("1",), ("25", "63")])),
    )
    stop_ids = frozenset(draw(st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=2)))
    prompt = draw(prompts(min(size.max_model_len, size.pool_len) - 1))
    return request(id_, prompt, params, stop_ids=stop_ids)


@st.composite
def events(draw: st.DrawFn, size: Limits, max_size: int = 25) -> list[Event]:
    """Arrivals, steps, failing steps, aborts and forks, in any order."""
    found: list[Event] = []
    n_requests = 0
    for kind in draw(st.lists(st.sampled_from("aasssssffxe"), min_size=1, max_size=max_size)):
        if kind == "a":
            n = draw(st.integers(1, 3))
            found.append(Arrive(tuple(draw(requests(n_requests + i, size)) for i in range(n))))
            n_requests += n
        elif kind in "se":
            found.append(Step() if kind == "s" else Fail())
        else:
            number = draw(st.integers(0, 7))
            found.append(Abort(number) if kind == "x" else Fork(number))
    return found
