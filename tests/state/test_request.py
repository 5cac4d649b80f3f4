"""What a user may ask: bad values are refused with what was given and what is allowed, before anything else happens."""

import math

import pytest

from nva.state.config import Limits
from nva.state.request import DEFAULTS, Request, SamplingParams, request

BAD = {
    "temperature": (-1, math.nan, math.inf, "hot", True, 1e39),
    "top_k": (-2, 1.5),
    "top_p": (0, 1.01, math.nan),
    "min_p": (-0.1, 2),
    "max_tokens": (0, -1, 2.5),
    "min_tokens": (-1,),
    "n": (0, 1.0),
    "seed": (-1, 2**64, "x"),
    "logprobs": (-1,),
    "prompt_logprobs": (-1,),
    "repetition_penalty": (0, math.nan, 1e39),
    "presence_penalty": (math.inf, 1e39, -1e39),
    "frequency_penalty": (math.nan, 1e39, -1e39),
    "stop": ("", ["a", ""], [1]),
    "stop_token_ids": ([-1], ["a"]),
    "logit_bias": ({-1: 0.0}, {0: math.nan}),
    "ignore_eos": ("no",),
    "priority": (math.nan,),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_is_refused_by_name(name, value) -> None:
    with pytest.raises(ValueError, match=f"^{name} (is|has) .*give"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "ours"),
    [("max_new_tokens", "max_tokens"), ("temprature", "temperature"), ("eos_token_id", "stop_token_ids")],
)
def test_an_unknown_name_suggests_ours(name, ours) -> None:
    with pytest.raises(ValueError, match=f"has no '{name}'; did you mean {ours}"):
        SamplingParams(**{name: 1})
    with pytest.raises(ValueError, match="known are temperature, top_k"):
        SamplingParams(zzzzzz=1)


def test_spellings_of_elsewhere_are_taken() -> None:
    params = SamplingParams(top_k=-1, stop="end", stop_token_ids=[3])
    assert (params.top_k, params.stop, params.stop_token_ids) == (0, ("end",), (3,))


def test_unset_fields_take_the_defaults_given_then_ours() -> None:
    params = SamplingParams(top_p=0.5).resolve({"temperature": 0.3, "top_p": 0.9})
    assert (params.temperature, params.top_p, params.max_tokens) == (0.3, 0.5, DEFAULTS["max_tokens"])
    with pytest.raises(ValueError, match="request 1 leaves temperature, .* unset; pass params.resolve"):
        Request(id=1, prompt=request(1, [1]).prompt, params=SamplingParams())


@pytest.mark.parametrize("prompt", [[], [1.5], [[1]], [-1], [2**31]])
def test_a_prompt_is_at_least_one_token_id(prompt) -> None:
    with pytest.raises(ValueError, match="request 'a': .*give"):
        request("a", prompt)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"n_blocks": 0}, "n_blocks is 0; give a whole number of at least 1"),
        ({"max_rows": True}, "max_rows is True"),
        ({"token_buckets": (8,)}, "give both or neither"),
        ({"token_buckets": (8, 4), "row_buckets": (9,)}, "ascending"),
        ({"token_buckets": (8,), "row_buckets": (9,)}, "below max_batched_tokens"),
        ({"token_buckets": (2048,), "row_buckets": (64,)}, r"below max_rows \+ 1"),
        ({"token_buckets": (2048,), "row_buckets": (65,), "max_model_len": 9}, "pad by up to 2047 tokens"),
    ],
)
def test_bad_limits_are_refused(sizes, message) -> None:
    with pytest.raises(ValueError, match=message):
        Limits(**{"vocab_size": 10, "max_model_len": 4096, "n_blocks": 4} | sizes)


def test_scratch_blocks_hold_the_largest_padding() -> None:
    limits = Limits(
        vocab_size=10,
        max_model_len=16,
        n_blocks=4,
        block_size=4,
        max_batched_tokens=32,
        token_buckets=(2, 16, 32),
        row_buckets=(65,),
    )
    assert limits.n_scratch == 4  # 17 tokens padded to 32 leave 15, in blocks of 4
