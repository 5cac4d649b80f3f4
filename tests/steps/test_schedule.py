"""Single decisions of schedule(), by hand."""

import attrs
import numpy as np

from nva.state.engine import check, empty
from nva.state.limits import Limits
from nva.state.request import SamplingParams, request
from nva.state.rows import SampleId
from nva.steps.schedule import schedule
from nva.steps.submit import submit
from nva.testing import Run, Step, Steps, ToyKV
from nva.testing.folds import apply, check_tokens, finish

LIMITS = Limits(vocab_size=7, max_model_len=32, n_blocks=8, block_size=1, max_rows=2)


def test_a_prompt_that_is_preempted_in_a_step_gets_no_chunk_in_it() -> None:
    """Row 0 grows by a block a step and takes the last one; row 1 still reads its prompt, a token a
    step, and gives way while a token of the budget is left for it."""
    limits = attrs.evolve(LIMITS, max_batched_tokens=2, prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=5)
    requests = [request(0, [1], params), request(1, [1, 2, 1, 1, 2, 1], params)]
    run = Run(state=submit(empty(limits), requests), kv=ToyKV.empty(limits), requests=requests)
    while not run.n_preempted:
        apply(run, Step(), Steps())
    plan = run.plans[-1]
    assert plan.preempted == (SampleId(arrival=1, sample=0),)
    assert (plan.rows.tolist(), plan.counts.tolist()) == ([0], [1])
    finish(run, Steps())
    for found in run.finished:
        check_tokens(found, limits)
    assert len(run.finished) == 2


def test_requests_without_a_seed_have_one_each_by_arrival_and_by_the_engines() -> None:
    def seeds(engine_seed: int) -> list[int]:
        params = SamplingParams(temperature=1)
        asked = [request(0, [1], params), request(1, [1], attrs.evolve(params, seed=5))]
        state, _ = schedule(submit(empty(LIMITS, seed=engine_seed), [*asked]))
        return state.rows.sampling["seed"].tolist()

    assert seeds(0) == [1, 5]
    factor = 0x9E3779B97F4A7C15
    assert [seeds(n)[0] for n in (1, 2, 2**64 + 3)] == [
        (n * factor + 1) % 2**64 for n in (1, 2, 2**64 + 3)
    ]
    state = submit(empty(LIMITS), [request(i, [1], SamplingParams()) for i in range(2)])
    assert schedule(state)[0].rows.sampling["seed"].tolist() == [1, 2]


def test_without_prefix_caching_no_block_is_keyed() -> None:
    asked = [request(0, [1, 2, 1], SamplingParams(temperature=0))]
    for is_on in (True, False):
        limits = attrs.evolve(LIMITS, prefix_caching=is_on)
        state, _ = schedule(submit(empty(limits), asked))
        assert len(state.blocks.keys) == (3 if is_on else 0)
        check(state)
    assert np.count_nonzero(state.blocks.ref_counts) == 3
