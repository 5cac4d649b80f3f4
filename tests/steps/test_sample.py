"""The sampler against brute force and statistics: filters, penalties, log-probabilities, noise and
its independence.

Read sample.py first. Every draw is a pure function of its key, so the statistics here are the same
on every run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from nva.state.plan import Draw
from nva.state.request import NO_LOGPROBS, ROW_PARAMS
from nva.steps import contenders
from nva.steps import sample as sample_module
from nva.steps.filters import adjust, filter_gaps, penalize, pick
from nva.steps.noise import gumbel, row_keys
from nva.steps.sample import choose, logprobs, sample

NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "n_logprobs": NO_LOGPROBS}
RNG = np.random.default_rng(0)


def draw_of(rows, *, samples=0, positions=7, penalized=(), bias=(), scored=(), k=0, **fields):
    """A Draw with a sample for each of these logits rows; numbers are the same for all, arrays are
    one for each."""
    params = np.zeros(len(rows), ROW_PARAMS)
    for name, value in (NEUTRAL | fields).items():
        params[name] = value
    score_rows, score_tokens = np.array(scored, np.int32).reshape(-1, 2).T.copy()

    def column(values):
        return np.broadcast_to(np.asarray(values, np.int32), len(rows)).copy()

    return Draw(
        logit_rows=np.array(rows, np.int32),
        params=params,
        samples=column(samples),
        positions=column(positions),
        penalized=tuple(
            (j, np.array(history, np.int32), n_prompt) for j, history, n_prompt in penalized
        ),
        bias_at=np.array([at[:2] for at in bias], np.int32).reshape(-1, 2),
        bias=np.array([at[2] for at in bias], np.float64),
        score_rows=score_rows,
        score_tokens=score_tokens,
        n_score_logprobs=k,
    )


def taken(draw: Draw, order: list[int]) -> Draw:
    """The draw of these samples alone, in this order."""
    place = {j: i for i, j in enumerate(order)}
    kept = [k for k, (j, _) in enumerate(draw.bias_at) if j in place]
    return draw_of(
        draw.logit_rows[order],
        samples=draw.samples[order],
        positions=draw.positions[order],
        penalized=[(place[j], *of) for j, *of in draw.penalized if j in place],
        bias=[(place[draw.bias_at[k, 0]], draw.bias_at[k, 1], draw.bias[k]) for k in kept],
        **{name: draw.params[name][order] for name in ROW_PARAMS.names},
    )


def tokens_of(logits, draw):
    return sample(torch.as_tensor(logits, dtype=torch.float32), draw).tokens


# Eighths make ties common; other numbers use every bit.
numbers = st.integers(-24, 24).map(lambda n: n / 8) | st.floats(-3, 3, width=32) | st.just(-np.inf)
logit_rows = st.lists(numbers, min_size=1, max_size=30).filter(lambda row: max(row) > -np.inf)
filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.25, 1.0, 4.0]),
        "top_k": st.sampled_from([0, 1, 2, 3, 7, 1000]),
        "top_p": st.sampled_from([1.0, 0.01, 0.3, 0.77, 0.95]),
        "min_p": st.sampled_from([0.0, 0.03, 0.4, 1.0]),
    }
)


# The noise


def test_noise_is_the_documented_hash():
    keys = RNG.integers(-(2**31), 2**31, (50, 2), dtype=np.int32)

    def finalized(x):  # MurmurHash3, in unsigned arithmetic
        x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        return x ^ x >> 16

    factor, offset = keys.astype(np.int64).T[..., None] & 0xFFFFFFFF
    hashed = finalized((finalized(np.arange(999)) * (factor | 1) + offset) & 0xFFFFFFFF)
    expected = -np.log(-np.log(((hashed >> 9) + 0.5) / 2**23))
    np.testing.assert_allclose(gumbel(torch.tensor(keys), 999), expected, rtol=1e-5, atol=1e-6)


def test_noise_belongs_to_the_token_bit_for_bit():
    keys = torch.tensor(RNG.integers(-(2**31), 2**31, (9, 2), dtype=np.int32))
    whole = gumbel(keys, 4099)
    for n_tokens in (1, 7, 33, 1000):
        assert torch.equal(gumbel(keys[4:5], n_tokens), whole[4:5, :n_tokens])


def test_noise_is_gumbel_distributed_and_bounded():
    noise = np.sort(gumbel(torch.tensor([[3, 5]], dtype=torch.int32), 2**18).numpy()[0])
    assert noise[0] > -2.9 and noise[-1] < 16.7
    distance = abs(np.exp(-np.exp(-noise)) - np.linspace(0, 1, len(noise))).max()
    assert distance < 2 / len(noise) ** 0.5  # Kolmogorov and Smirnov, at a level of 0.1 %


@pytest.mark.parametrize("varied", ["seed", "samples", "positions", "purpose"])
def test_noise_of_neighbours_is_uncorrelated(varied):
    n, n_tokens = 64, 4096
    numbers = np.arange(n) if varied != "purpose" else 0
    draw = draw_of([0] * n, **({varied: numbers} if varied != "purpose" else {}))
    if varied == "purpose":
        keys = np.concatenate([row_keys(draw, np.array([0]), purpose) for purpose in range(n)])
    else:
        keys = row_keys(draw, np.arange(n))
    noise = gumbel(torch.tensor(keys), n_tokens).numpy()
    correlations = np.corrcoef(noise) - np.eye(n)
    assert abs(correlations).max() < 6 / n_tokens**0.5
    assert abs(np.corrcoef(noise[:, :-1].ravel(), noise[:, 1:].ravel())[0, 1]) < 6 / noise.size**0.5


# The draw


def assert_fits(counts, probs):
    """Pearson's chi-square test at 5 standard deviations (approximation of Wilson and Hilferty
    1931)."""
    counts, expected = counts[probs > 0], probs[probs > 0] * counts.sum()
    assert counts.sum() == expected.sum().round() and expected.min() > 5
    df = len(counts) - 1
    bound = df * (1 - 2 / (9 * df) + 5 * (2 / (9 * df)) ** 0.5) ** 3
    assert ((counts - expected) ** 2 / expected).sum() < bound


LOGITS = np.array([0.0, 2.0, -1.0, 1.5, 0.5, -2.0, 1.0, 1.0, -0.5, 0.25, 2.5, -3.0])


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


@pytest.mark.parametrize("varied", ["seed", "samples", "positions"])
@pytest.mark.parametrize("temperature", [1.0, 0.8, 3.0])
def test_frequencies_are_the_softmax(varied, temperature):
    n = 40_000
    tokens = tokens_of(
        LOGITS[None], draw_of([0] * n, temperature=temperature, **{varied: np.arange(n)})
    )
    assert_fits(np.bincount(tokens, minlength=12), softmax(LOGITS / temperature))


@pytest.mark.parametrize("keeps_three", [{"top_k": 3}, {"top_p": 0.65}, {"min_p": 0.3}])
def test_frequencies_are_the_renormalised_softmax_of_what_is_kept(keeps_three):
    tokens = tokens_of(
        LOGITS[None], draw_of([0] * 20_000, positions=np.arange(20_000), **keeps_three)
    )
    likeliest = np.argsort(-LOGITS)[:3]
    probs = np.zeros(12)
    probs[likeliest] = softmax(LOGITS[likeliest])
    assert_fits(np.bincount(tokens, minlength=12), probs)


@pytest.mark.parametrize("varied", ["seed", "samples", "positions"])
def test_neighbouring_draws_are_independent(varied):
    n = 40_000
    tokens = tokens_of(LOGITS[None, :5], draw_of([0] * n, **{varied: np.arange(n)})).astype(
        np.int64
    )
    probs = softmax(LOGITS[:5])
    for lag in (1, 2, 256):
        pairs = np.bincount(tokens[:-lag] * 5 + tokens[lag:], minlength=25)
        assert_fits(pairs, np.outer(probs, probs).ravel())


# Filters


def kept_by_hand(gaps, params, slack):
    """Which tokens stay, one by one from the definition; slack widens each bound where rounding
    could decide."""
    weights, n = np.exp(-gaps.astype(np.float64)), len(gaps)
    k = params["top_k"] if 0 < params["top_k"] < n else n
    passes_min_p = weights >= params["min_p"] * (1 - slack)
    mass = np.sort(weights * passes_min_p)[::-1][:k].sum()
    kept = passes_min_p & (gaps < np.inf)
    for i in range(n):
        is_likelier = gaps < gaps[i]
        passes_top_p = (
            params["top_p"] == 1 or weights[is_likelier].sum() < (params["top_p"] + slack) * mass
        )
        kept[i] &= is_likelier.sum() < k and passes_top_p
    return kept


BOTH_P = {
    "temperature": 1.0,
    "top_p": 0.5,
    "min_p": 0.5,
}  # min_p leaves 0.4 and 0.3, and half of that is below 0.4


@given(row=logit_rows, params=st.lists(filters, min_size=1, max_size=4))
@example(row=np.log([0.4, 0.3, 0.1, 0.1, 0.1]).tolist(), params=[BOTH_P | {"top_k": 0}])
@example(row=np.log([0.4, 0.3, 0.1, 0.1, 0.1]).tolist(), params=[BOTH_P | {"top_k": 4}])
def test_filters_keep_what_their_definition_keeps(row, params):
    columns = {name: np.array([of[name] for of in params]) for name in params[0]}
    x = torch.tensor([row] * len(params), dtype=torch.float32)
    gaps = (x.max() - x) / torch.tensor(columns["temperature"], dtype=torch.float32)[:, None]
    before = gaps.numpy().copy()
    filter_gaps(gaps, draw_of([0] * len(params), **columns).params)
    for kept, of, all_gaps in zip((gaps < torch.inf).numpy(), params, before, strict=True):
        assert (kept_by_hand(all_gaps, of, -1e-5) <= kept).all() and (
            kept <= kept_by_hand(all_gaps, of, 1e-5)
        ).all()
        assert kept[np.argmax(row)]


@given(row=logit_rows, top_p=st.floats(0.01, 1), min_p=st.sampled_from([0.0, 0.1]))
def test_searching_and_sorting_find_the_same_nucleus(row, top_p, min_p):
    x = torch.tensor(
        [[*row, -100.0]], dtype=torch.float32
    )  # a last token, so that top_k leaves something out

    def kept(top_p, top_k):
        gaps = x.max() - x
        filter_gaps(gaps, draw_of([0], top_p=top_p, min_p=min_p, top_k=top_k).params)
        return (gaps < torch.inf)[0, : len(row)].numpy()

    searched, n = kept(top_p, 0), len(row)
    assert (kept(top_p - 1e-5, n) <= searched).all() and (searched <= kept(top_p + 1e-5, n)).all()


@pytest.mark.parametrize("n_tokens", [2, 60, 3000])
def test_a_batch_gives_what_the_plain_functions_give_row_by_row(n_tokens):
    """The meaning against the speed: every filter, penalty and kind of sample in one batch."""
    n = 240
    logits = RNG.normal(size=(n, n_tokens)) * 2 + 6 * (RNG.random((n, n_tokens)) < 0.02)
    history = [RNG.integers(0, n_tokens, 9) for _ in range(n)]
    draw = draw_of(
        range(n),
        samples=range(n),
        temperature=RNG.choice([0, 0.5, 1.0, 1.5], n),
        min_p=RNG.choice([0, 0.02, 0.2], n),
        top_k=RNG.choice([0, 1, 5, 40], n),
        top_p=RNG.choice([1.0, 0.5, 0.9], n),
        repetition_penalty=RNG.choice([1.0, 1.5], n),
        presence_penalty=RNG.choice([0.0, 0.5], n),
        frequency_penalty=RNG.choice([0.0, -0.25], n),
        penalized=[(j, history[j], 4) for j in range(0, n, 2)],
    )
    x = torch.tensor(logits, dtype=torch.float32)
    noise = gumbel(torch.tensor(row_keys(draw, np.arange(n))), n_tokens)
    expected = []
    for j in range(n):
        row, params = x[j], draw.params[j]
        penalties = [
            float(params[name])
            for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
        ]
        if j % 2 == 0:
            row = penalize(row, torch.tensor(history[j]), 4, *penalties)
        expected.append(int(pick(row, noise[j], params)))
    assert tokens_of(x, draw).tolist() == expected


@pytest.mark.parametrize("top_k", [[0, 0], [4, 4]], ids=["bits", "sorted"])
def test_where_top_p_is_off_no_rounding_drops_a_token(top_k):
    """The last tokens are too unlikely to change a sum in float32; a batch mate has a top_p."""
    gaps = torch.tensor([[0.0, 30.0, 31.0, 32.0, 33.0]] * 2)
    filter_gaps(gaps, draw_of([0, 0], top_p=[1.0, 0.5], top_k=top_k).params)
    n_kept = (gaps < torch.inf).sum(1).tolist()
    assert n_kept == [top_k[0] or 5, 1]


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("top_p", [1.0, 0.99])
def test_a_token_exactly_at_the_limit_of_min_p_stays(top_k, top_p):
    limit = -np.log(np.float32(0.5))
    gaps = torch.tensor([[0.0, float(limit), float(np.nextafter(limit, np.float32(9))), 5.0]])
    filter_gaps(gaps, draw_of([0], min_p=0.5, top_k=top_k, top_p=top_p).params)
    assert (gaps < torch.inf).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("temperature", [0.0, None], ids=["greedy", "mixed"])
def test_a_device_gives_what_the_host_gives(monkeypatch, temperature):
    """The ways of a device, run here: nothing is gathered, and one copy brings all results."""
    n, n_tokens = 60, 3000
    logits = torch.tensor(RNG.normal(size=(n, n_tokens)) * 3, dtype=torch.float32)
    logits[7] = torch.nan
    kinds = {
        "temperature": RNG.choice([0, 0.7, 1.2], n) if temperature is None else temperature,
        "top_k": RNG.choice([0, 3, 40], n),
        "top_p": RNG.choice([1.0, 0.9], n),
        "min_p": RNG.choice([0.0, 0.05], n),
    }
    draw = draw_of(range(n), samples=range(n), n_logprobs=2, scored=[(0, 3), (2, 1)], k=1, **kinds)
    on_host = sample(logits, draw)
    for module in (sample_module, contenders):
        monkeypatch.setattr(module, "on_host", lambda x: False)
    found = sample(logits, draw)
    assert found.is_finite.dtype == on_host.is_finite.dtype == np.bool_
    assert found.is_finite.tolist() == on_host.is_finite.tolist()
    assert not found.is_finite[7]
    healthy = found.is_finite
    assert (found.tokens[healthy] == on_host.tokens[healthy]).all()
    for name in ("chosen", "ranks", "top_tokens", "top"):
        ours, theirs = getattr(on_host.logprobs, name), getattr(found.logprobs, name)
        assert ours.dtype == theirs.dtype
        assert (ours[healthy] == theirs[healthy]).all()
        assert (getattr(on_host.scores, name) == getattr(found.scores, name)).all()


def test_ties_at_the_edge_stay_together():
    row = [1.0, 3.0, 1.0, 2.0, 1.0, 0.0]
    for params in (
        {"top_k": 3},
        {"top_p": 0.8},
        {"top_k": 3, "top_p": 0.999},
        {"min_p": np.float32(np.exp(-2.0001))},
    ):
        tokens = tokens_of([row], draw_of([0] * 2000, positions=np.arange(2000), **params))
        assert set(tokens) == {0, 1, 2, 3, 4}, params


@pytest.mark.parametrize(
    "narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-6}]
)
def test_the_narrowest_filter_is_greedy(narrow):
    logits = RNG.normal(size=(200, 50)).astype(np.float32)
    assert (tokens_of(logits, draw_of(range(200), **narrow)) == logits.argmax(-1)).all()


def test_greedy_takes_the_lowest_of_equal_maxima_whatever_the_filters():
    logits = np.zeros((4, 300))
    logits[:, [170, 171, 299]] = 5
    greedy = draw_of(range(4), temperature=0, top_k=[0, 1, 2, 0], top_p=[1, 1, 0.1, 0.5])
    assert tokens_of(logits, greedy).tolist() == [170] * 4


# Penalties and bias


def adjusted(logits, draw):
    x = torch.as_tensor(logits, dtype=torch.float32).clone()
    adjust(x, draw, np.arange(len(logits)))
    return x.numpy()


@given(
    row=st.lists(st.floats(-8, 8, width=32), min_size=6, max_size=6),
    history=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    n_prompt=st.integers(1, 12),
    repetition=st.sampled_from([1.0, 0.5, 1.75]),
    presence=st.sampled_from([0.0, -0.5, 1.25]),
    frequency=st.sampled_from([0.0, 0.25]),
)
def test_penalties_are_as_defined(row, history, n_prompt, repetition, presence, frequency):
    expected = np.array(row)
    for token in set(history):
        n_output = history[n_prompt:].count(token)
        expected[token] *= repetition if expected[token] < 0 else 1 / repetition
        expected[token] -= presence * (n_output > 0) + frequency * n_output
    draw = draw_of(
        [0, 1],
        penalized=[(1, history, n_prompt)],
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    unpenalized, penalized = adjusted([row, row], draw)
    assert (unpenalized == np.array(row, np.float32)).all()
    np.testing.assert_allclose(penalized, expected, atol=1e-5)


def test_repetition_penalty_agrees_with_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.tensor(RNG.normal(size=(3, 40)), dtype=torch.float32)
    histories = RNG.integers(0, 40, (3, 15))
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor(histories), logits.clone())
    draw = draw_of(
        range(3), penalized=[(j, histories[j], 5) for j in range(3)], repetition_penalty=1.3
    )
    np.testing.assert_allclose(adjusted(logits, draw), expected, rtol=1e-6)


def test_a_penalty_that_overflows_gives_the_largest_number():
    draw = draw_of([0], penalized=[(0, [0, 1], 1)], repetition_penalty=1e-3)
    np.testing.assert_array_equal(
        adjusted([[1e38, -2.0]], draw), np.float32([[np.finfo(np.float32).max, -0.002]])
    )


def test_bias_is_added_after_penalties():
    bias = [(0, 1, 3.0), (1, 0, -np.inf), (1, 2, 1e300), (2, 0, np.inf), (2, 1, 3e38)]
    draw = draw_of(range(3), bias=bias, penalized=[(0, [1], 1)], repetition_penalty=2.0)
    most = np.finfo(np.float32).max
    expected = [[1, 4 / 2 + 3, -np.inf], [-np.inf, 4, -np.inf], [most, most, -np.inf]]
    logits = [[1.0, 4.0, -np.inf], [1.0, 4.0, -np.inf], [1.0, 1e38, -np.inf]]
    np.testing.assert_array_equal(adjusted(logits, draw), expected)


def test_a_banned_token_is_never_drawn_and_a_forced_one_always():
    draw = draw_of([0] * 500, positions=np.arange(500), bias=[(j, 3, -np.inf) for j in range(250)])
    tokens = tokens_of([[0.0, 0.0, 0.0, 2.0]], draw)
    assert 3 not in tokens[:250] and 3 in tokens[250:]
    forced = draw_of([0] * 100, positions=np.arange(100), bias=[(j, 2, np.inf) for j in range(100)])
    assert (tokens_of([[0.0, 0.0, -50.0, 2.0]], forced) == 2).all()


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str
)
def test_where_every_token_is_banned_none_is_given(params):
    logits = torch.randn(2, 5)
    bans = [(0, token, -np.inf) for token in range(5)]
    found = sample(logits, draw_of([0, 1], bias=bans, **params))
    assert found.is_finite.tolist() == [False, True]
    assert found.tokens[1] == tokens_of(logits[1:], draw_of([0], **params))[0]


# What a token depends on


def random_draw(data, n_rows, n_tokens):
    samples = data.draw(st.lists(st.integers(0, n_rows - 1), min_size=1, max_size=8), label="rows")
    fields = {
        name: [] for name in ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty")
    }
    for _ in samples:
        for name, value in data.draw(filters).items():
            fields[name].append(value)
        fields["seed"].append(data.draw(st.integers(0, 2**64 - 1)))
        fields["presence_penalty"].append(0.5)
        if data.draw(st.integers(0, 3)) == 0:
            fields["temperature"][-1] = 0
    fields["seed"] = np.array(fields["seed"], np.uint64)
    some = st.lists(st.integers(0, len(samples) - 1), unique=True)
    tokens = st.integers(0, n_tokens - 1)
    penalized = [
        (j, data.draw(st.lists(tokens, min_size=2, max_size=5)), 1) for j in data.draw(some)
    ]
    bias = [
        (j, data.draw(tokens), data.draw(st.sampled_from([-np.inf, 1.5]))) for j in data.draw(some)
    ]
    return draw_of(
        samples, samples=np.arange(len(samples)), penalized=penalized, bias=bias, **fields
    )


@given(data=st.data(), rows_per_slice=st.sampled_from([1, 2, 1000]))
def test_a_token_is_the_same_alone_and_in_any_batch(data, rows_per_slice):
    n_rows, n_tokens = 5, 11
    eighths = st.lists(st.integers(-24, 24), min_size=n_tokens, max_size=n_tokens)
    logits = np.array(data.draw(st.lists(eighths, min_size=n_rows, max_size=n_rows))) / 8
    logits[data.draw(st.integers(0, n_rows - 1))] = data.draw(
        st.sampled_from([np.nan, np.inf, -np.inf, 0.0])
    )
    draw = random_draw(data, n_rows, n_tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_module, "_HOST_SLICE", rows_per_slice * n_tokens * 4)
        together = tokens_of(logits, draw)
        order = data.draw(st.permutations(range(len(together))))[
            : data.draw(st.integers(1, len(together)))
        ]
        assert (tokens_of(logits, taken(draw, order)) == together[order]).all()
    assert ((together >= 0) & (together < n_tokens)).all()


@pytest.mark.parametrize("spread", [0.0, 3.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("temperature", [1e-3, 0.7, 1.5])
@pytest.mark.parametrize(
    "options", [{}, {"min_p": 0.02}, {"top_k": 3}, {"top_k": 20, "top_p": 0.8}], ids=str
)
def test_looking_at_few_tokens_gives_what_looking_at_all_gives(spread, temperature, options):
    """Exactly: the same noise and the same gaps, compared among the same tokens or more."""
    n, n_tokens = 40, 6000
    logits = RNG.normal(size=(n, n_tokens)) * spread + 9 * (RNG.random((n, n_tokens)) < 0.01)
    draw = draw_of(range(n), temperature=temperature, samples=range(n), **options)
    x = torch.tensor(logits, dtype=torch.float32)
    gaps = (x - x.amax(-1, keepdim=True)) / -torch.tensor(
        draw.params["temperature"][:, None].copy()
    )
    filter_gaps(gaps, draw.params)
    noise = gumbel(torch.tensor(row_keys(draw, np.arange(n))), n_tokens)
    assert tokens_of(x, draw).tolist() == (noise - gaps).numpy().argmax(-1).tolist()


def test_samples_of_one_prompt_differ_and_repeat():
    logits = RNG.normal(size=(1, 1000))
    tokens = tokens_of(logits, draw_of([0] * 50, samples=np.arange(50)))
    assert len(set(tokens)) > 25
    assert (tokens == tokens_of(logits, draw_of([0] * 50, samples=np.arange(50)))).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_told_and_disturb_no_other(bad):
    logits = RNG.normal(size=(6, 30)).astype(np.float32)
    spoiled = logits.copy()
    spoiled[2] = bad
    spoiled[4, 7] = bad
    kinds = {"temperature": [0, 1, 1, 1], "top_k": [0, 0, 0, 5], "top_p": [1, 1, 0.8, 0.9]}
    draw = draw_of(
        np.repeat(np.arange(6), 4), **{name: np.tile(values, 6) for name, values in kinds.items()}
    )
    healthy = sample(torch.tensor(logits), draw)
    result = sample(torch.tensor(spoiled), draw)
    is_bad = np.isin(draw.logit_rows, [2] if bad == -np.inf else [2, 4])
    assert healthy.is_finite.all() and (result.is_finite == ~is_bad).all()
    same = ~np.isin(draw.logit_rows, [2, 4])
    assert (result.tokens[same] == healthy.tokens[same]).all()
    assert ((result.tokens >= 0) & (result.tokens < 30)).all()


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0, 1e6])
@pytest.mark.parametrize(
    "params", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 3, "top_p": 0.9}]
)
def test_extreme_logits(temperature, params):
    rows = [
        [-1e30, 1e30, 0, -np.inf],
        [-np.inf, -np.inf, -1e30, -np.inf],
        [-3e38, -3e38, 3e38, -3e38],
    ]
    result = sample(torch.tensor(rows), draw_of(range(3), temperature=temperature, **params))
    assert result.tokens.tolist() == [1, 2, 2] and result.is_finite.all()


def test_the_callers_logits_are_left_alone_and_padding_rows_are_not_read():
    logits = torch.tensor(RNG.normal(size=(5, 20)), dtype=torch.float32)
    logits[3:] = torch.nan
    before = logits.clone()
    changes = {"bias": [(0, 1, 3.0)], "penalized": [(1, [1, 2], 1)], "presence_penalty": 1}
    draw = draw_of([0, 2, 2], top_p=0.5, n_logprobs=2, **changes)
    assert sample(logits, draw).is_finite.all()
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())


def test_nothing_to_sample():
    result = sample(torch.zeros(2, 8), draw_of([], scored=[(0, 3), (1, 4)], k=1))
    assert result.tokens.shape == result.is_finite.shape == (0,) and result.logprobs is None
    assert result.scores is not None and result.scores.top.shape == (2, 1)
    assert sample(torch.zeros(0, 8), draw_of([])).scores is None


# Log-probabilities


def check_logprobs(found, logits, rows, tokens, k):
    scores = np.stack([np.log(softmax(logits[row].astype(np.float64))) for row in rows])
    chosen = np.take_along_axis(scores, np.array(tokens)[:, None], 1)
    np.testing.assert_allclose(found.chosen, chosen[:, 0], atol=1e-5)
    assert (found.ranks == 1 + (scores > chosen).sum(1)).all()
    np.testing.assert_allclose(found.top, -np.sort(-scores, axis=1)[:, :k], atol=1e-5)
    np.testing.assert_allclose(
        found.top, np.take_along_axis(scores, found.top_tokens, 1), atol=1e-5
    )


@pytest.mark.parametrize("rows_per_slice", [1, 3, 1000])
@pytest.mark.parametrize("k", [0, 1, 5, 99])
def test_logprobs_are_of_the_raw_distribution(monkeypatch, rows_per_slice, k):
    monkeypatch.setattr(sample_module, "_HOST_SLICE", rows_per_slice * 30 * 4)
    logits = RNG.normal(size=(6, 30)).astype(np.float32)
    scored = [(4, 11), (5, 0), (4, 29)]
    draw = draw_of(
        [3, 0, 3, 1],
        samples=np.arange(4),
        temperature=[0.5, 0, 2, 1],
        top_k=[3, 0, 0, 2],
        bias=[(1, 7, 50.0)],
        n_logprobs=[NO_LOGPROBS, k, NO_LOGPROBS, 0],
        scored=scored,
        k=2,
    )
    result = sample(torch.tensor(logits), draw)
    assert result.tokens[1] == 7
    check_logprobs(result.logprobs, logits, [3, 0, 3, 1], result.tokens, min(k, 30))
    check_logprobs(result.scores, logits, *zip(*scored, strict=True), 2)


def test_equal_tokens_share_a_rank():
    found = sample(
        torch.tensor([[2.0, 5.0, 5.0, 1.0]]), draw_of([], scored=[(0, t) for t in range(4)])
    ).scores
    assert found is not None and found.ranks.tolist() == [3, 1, 1, 4]


def test_no_logprobs_unless_asked():
    result = sample(torch.zeros(1, 4), draw_of([0]))
    assert result.logprobs is None and result.scores is None


# The device


def test_nothing_waits_for_the_device():
    """Tensors on the meta device have no values, so an operation that had to read one there would
    raise."""
    params = {
        "temperature": [0, 1, 1, 1, 1],
        "top_k": [0, 0, 5, 0, 3],
        "top_p": [1, 1, 1, 0.9, 0.5],
        "min_p": 0.01,
    }
    draw = draw_of(
        range(5), bias=[(0, 1, 2.0)], penalized=[(2, [1, 2, 3], 1)], frequency_penalty=0.1, **params
    )
    logits = torch.empty(5, 64, device="meta")
    picked = choose(logits, draw)
    assert picked.shape == (2, 5)
    assert [tensor.shape for tensor in logprobs(logits, draw.logit_rows, picked[0], 3)] == [
        (5,),
        (5,),
        (5, 3),
        (5, 3),
    ]
