"""The records of a step say by name what they were given that they can't take."""

import attrs
import numpy as np
import pytest

from nva.state.engine import empty
from nva.state.limits import Limits
from nva.state.plan import BATCH_ARRAYS, Batch, Plan, Sampled, batch_of
from nva.state.policy import Policy, by_priority, first_come_first_served, shortest_first
from nva.state.request import Request, SamplingParams, request
from nva.steps.commit import commit
from nva.steps.pack import pack
from nva.steps.schedule import schedule
from nva.steps.submit import submit

LIMITS = Limits(vocab_size=7, max_model_len=32, n_blocks=8, block_size=4, max_rows=3)


def planned(*prompts: list[int], **fields):
    params = SamplingParams(temperature=0, max_tokens=4, **fields)
    requests = [request(i, prompt, params) for i, prompt in enumerate(prompts)]
    return schedule(submit(empty(LIMITS), requests))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": [0]}, r"Plan.rows is \[0\]; give a numpy array"),
        ({"copies": None}, "Plan.copies is None; give a numpy array"),
        ({"counts": np.zeros(3, np.int32)}, "Plan.counts has 3 entries and Plan.rows 1; give one"),
        (
            {"sample_numbers": np.zeros(0, np.int32)},
            "Plan.sample_numbers has 0 .* Plan.sample_rows 1",
        ),
        ({"token_sources": np.zeros(2, np.int32)}, "Plan.token_sources has 2 .* Plan.rows 1"),
        ({"token_sources": [1]}, r"Plan.token_sources is \[1\]; give a numpy array"),
    ],
)
def test_a_wrong_plan_is_refused_by_its_field(changes, message) -> None:
    _, plan = planned([1, 2])
    with pytest.raises(ValueError, match=message):
        attrs.evolve(plan, **changes)


def test_every_array_of_a_step_is_read_only() -> None:
    state, plan = planned([1, 2])
    batch, draw = pack(state, plan)
    sampled = Sampled(tokens=np.array([1], np.int32), is_finite=np.ones(1, np.bool_))
    _, output = commit(state, plan, sampled)
    for record in (plan, batch, draw, sampled, output):
        arrays = [v for v in vars(record).values() if isinstance(v, np.ndarray)]
        assert arrays and not any(array.flags.writeable for array in arrays)


def test_a_sampler_that_gives_a_list_or_too_few_tokens_is_told() -> None:
    state, plan = planned([1, 2], [1, 3])
    with pytest.raises(ValueError, match=r"Sampled.tokens is \[1, 2\]; give a numpy array"):
        Sampled(tokens=[1, 2], is_finite=np.ones(2, np.bool_))
    one = Sampled(tokens=np.array([1], np.int32), is_finite=np.ones(1, np.bool_))
    with pytest.raises(ValueError, match="Sampled.tokens has 1 entries .* the plan has 2 samples"):
        commit(state, plan, one)


def test_a_batch_is_its_buffer() -> None:
    """What is evolved beside the buffer would never reach the device."""
    batch, _ = pack(*planned([1, 2, 3]))
    with pytest.raises(ValueError, match="Batch.logit_index is not a view .* batch_of"):
        attrs.evolve(batch, logit_index=np.array([0, 1], np.int32))
    with pytest.raises(ValueError, match="don't fill its buffer"):
        attrs.evolve(batch, logit_index=batch.logit_index[:0])
    arrays = {name: getattr(batch, name) for name in BATCH_ARRAYS}
    other = batch_of({**arrays, "logit_index": np.array([0, 1])}, n_tokens=3, n_rows=1, n_logits=2)
    assert other.logit_index.tolist() == [0, 1] and other.slots.tolist() == batch.slots.tolist()
    assert np.concatenate([getattr(other, name).ravel() for name in BATCH_ARRAYS]).tolist() == (
        other.buffer.tolist()
    )


def test_the_order_of_a_batchs_arrays_is_that_of_its_fields() -> None:
    names = [field.name for field in attrs.fields(Batch)]
    assert list(BATCH_ARRAYS) == names[1 : 1 + len(BATCH_ARRAYS)]
    assert names[0] == "buffer"


@pytest.mark.parametrize("result", [1.0, None, (None, "late"), (1, 2, 3), (None, float("nan"))])
def test_a_policy_that_gives_no_pair_of_state_and_rank_is_told(result) -> None:
    policy = Policy(name="mine", init=dict, step=lambda state, request, arrival: result)
    with pytest.raises(ValueError, match="policy 'mine': step gave .*; give a pair"):
        submit(empty(LIMITS, policy), [request(0, [1])])


def test_the_policies_order_by_arrival_priority_and_length() -> None:
    def rank(policy: Policy, **fields) -> float:
        params = SamplingParams(**fields).resolve()
        return policy.step(None, Request(id=0, prompt=np.ones(3, np.int32), params=params), 5)[1]

    assert rank(first_come_first_served, priority=3) == 0
    assert rank(by_priority, priority=3) == 3
    assert rank(shortest_first, max_tokens=4) == 7


def test_a_draw_says_whose_samples_it_asks_for() -> None:
    state, plan = planned([1, 2], [1, 3], n=1)
    _, draw = pack(state, plan)
    assert draw.arrivals.tolist() == [0, 1]
    assert [each.id for each in draw.requests] == [0, 1]
    assert isinstance(plan, Plan)


def test_probes_find_the_logits_of_any_planned_token() -> None:
    """Beside samples and prompt scores, in a row of logits of their own."""
    state, plan = planned([1, 2, 3], [4, 5], prompt_logprobs=1)
    probed = attrs.evolve(plan, probes=np.array([0, 4, 0]))
    batch, draw = pack(state, probed)
    assert batch.logit_index[draw.logit_rows].tolist() == [2, 4]
    assert batch.logit_index[draw.score_rows].tolist() == [0, 1, 3]
    assert batch.logit_index[draw.probe_rows].tolist() == [0, 4, 0]
    assert batch.n_logits == len(batch.logit_index) == 8
    _, without = pack(state, plan)
    assert not len(without.probe_rows)


@pytest.mark.parametrize("probe", [-1, 5])
def test_probes_beyond_the_step_are_refused(probe) -> None:
    state, plan = planned([1, 2, 3], [4, 5])
    with pytest.raises(ValueError, match=r"the step packs tokens \[0, 5\)"):
        pack(state, attrs.evolve(plan, probes=np.array([probe])))


def test_more_scores_and_probes_than_a_step_has_are_refused() -> None:
    few = attrs.evolve(LIMITS, max_scored_tokens=2)
    params = SamplingParams(temperature=0, prompt_logprobs=0)
    state, plan = schedule(submit(empty(few), [request(0, [1, 2], params)]))
    pack(state, attrs.evolve(plan, probes=np.array([1])))
    with pytest.raises(ValueError, match="1 scores and 2 probes; a step has max_scored_tokens, 2"):
        pack(state, attrs.evolve(plan, probes=np.array([1, 1])))


def test_a_bias_is_packed_once_for_each_sample_and_a_ban_goes_before_it() -> None:
    params = SamplingParams(temperature=0, min_tokens=1, logit_bias={2: 1.5, 5: -2.0}, n=2)
    asked = [request(0, [1], params, stop_ids={5, 6}), request(1, [1], SamplingParams())]
    state, plan = schedule(submit(empty(LIMITS), asked))
    _, draw = pack(state, plan)
    found = {
        tuple(at): bias for at, bias in zip(draw.bias_at.tolist(), draw.bias.tolist(), strict=True)
    }
    biased = [j for j, arrival in enumerate(draw.arrivals.tolist()) if arrival == 0]
    assert len(biased) == 2 and len(found) == len(draw.bias) == 6
    for j in biased:
        assert [found[j, token] for token in (2, 5, 6)] == [1.5, -np.inf, -np.inf]


def test_the_errors_of_limits_say_what_to_change() -> None:
    with pytest.raises(ValueError, match="lookahead is -1"):
        attrs.evolve(LIMITS, lookahead=-1)
    with pytest.raises(ValueError, match="the largest row bucket, 3, is below max_rows"):
        attrs.evolve(LIMITS, token_buckets=(4, 2048), max_model_len=2048, row_buckets=(3,))
    padded = attrs.evolve(LIMITS, max_batched_tokens=9, token_buckets=(2, 9), row_buckets=(4,))
    assert (padded.n_scratch, LIMITS.n_scratch) == (2, 1)
