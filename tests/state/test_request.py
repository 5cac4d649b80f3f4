"""What a user may ask: bad values are refused with what was given and what is allowed, before
anything else happens."""

import inspect
import math

import attrs
import numpy as np
import pytest

from nva.state.checks import is_list
from nva.state.limits import Limits
from nva.state.request import DEFAULTS, Request, SamplingParams, request, sampling_of

BAD = {
    "temperature": (-1, math.nan, math.inf, "hot", "1", True, np.True_, 1e39, 10**400, [1.0]),
    "top_k": (-2, -2.0, 1.5, "50", True, np.True_, math.nan, math.inf, 2.0**63, [50]),
    "top_p": (0, 0.0, 1.01, math.nan, "0.9", False),
    "min_p": (-0.1, 2),
    "max_tokens": (0, -1, 2.5, 2**63, 1e30, "20", np.float32(0.5)),
    "min_tokens": (-1, None),
    "n": (0, 1.5, None, True),
    "seed": (-1, 2**64, "x", 0.5),
    "logprobs": (-1,),
    "prompt_logprobs": (-1,),
    "repetition_penalty": (0, math.nan, 1e39),
    "presence_penalty": (math.inf, 1e39, -1e39),
    "frequency_penalty": (math.nan, 1e39, -1e39),
    "stop": ("", ["a", ""], [1], 5, 0, b"a", {"a": 1}),
    "stop_token_ids": ([-1], ["a"], 5, 0, "a", [True], [1.5], [None], [[1]]),
    "logit_bias": (
        {-1: 0.0},
        {0: math.nan},
        {0: 10**400},
        {0: True},
        {"a": 1.0},
        {"-1": 1.0},
        {"": 1.0},
        {"9" * 5000: 1.0},
        {1.5: 1.0},
        {0: "1"},
        {0: None},
        [1, 2],
        5,
        "a",
    ),
    "ignore_eos": ("no", 1, None),
    "priority": (math.nan, None),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
def test_a_bad_value_is_refused_by_name(name, value) -> None:
    with pytest.raises(ValueError, match=f"^{name} (is|has) .*give"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("max_new_tokens", "max_tokens"),
        ("temprature", "temperature"),
        ("eos_token_id", "stop_token_ids"),
    ],
)
def test_an_unknown_name_suggests_ours(name, ours) -> None:
    with pytest.raises(ValueError, match=f"has no '{name}'; did you mean {ours}"):
        SamplingParams(**{name: 1})
    with pytest.raises(ValueError, match="known are temperature, top_k"):
        SamplingParams(zzzzzz=1)


def test_the_signature_is_that_of_the_fields() -> None:
    shown = inspect.signature(SamplingParams).parameters
    assert list(shown) == [field.name for field in attrs.fields(SamplingParams)]
    found = {
        name: (shown[name].annotation, shown[name].default) for name in ("temperature", "n", "stop")
    }
    assert found["temperature"] == ("float | None", None)
    assert found["n"] == ("int", 1)
    assert found["stop"] == ("str | Iterable[str] | None", ())


def test_spellings_of_elsewhere_are_taken() -> None:
    params = SamplingParams(top_k=-1, stop="end", stop_token_ids=[3])
    assert (params.top_k, params.stop, params.stop_token_ids) == (0, ("end",), (3,))


def test_numbers_of_numpy_become_pythons() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(-1),
        max_tokens=np.int64(3),
        seed=np.uint64(2**64 - 1),
        stop_token_ids=np.array([3, 4]),
        logit_bias={np.int64(5): np.float32(1.5)},
    )
    assert params == SamplingParams(
        temperature=0.5,
        top_k=-1,
        max_tokens=3,
        seed=2**64 - 1,
        stop_token_ids={3, 4},
        logit_bias={5: 1.5},
    )
    found = (
        params.temperature,
        params.max_tokens,
        *params.stop_token_ids,
        *params.logit_bias.items(),
    )
    assert repr(found) == "(0.5, 3, 3, 4, (5, 1.5))"


def test_whole_numbers_are_taken_as_json_writes_them() -> None:
    found = SamplingParams(
        top_k=50.0,
        max_tokens=np.float64(20),
        min_tokens=2.0,
        n=1.0,
        seed=7.0,
        logprobs=3.0,
        stop_token_ids=[2.0],
        logit_bias={"5": 1, 6.0: 2},
        ignore_eos=np.True_,
    )
    expected = SamplingParams(
        top_k=50,
        max_tokens=20,
        min_tokens=2,
        n=1,
        seed=7,
        logprobs=3,
        stop_token_ids=[2],
        logit_bias={5: 1, 6: 2},
        ignore_eos=True,
    )
    assert found == expected
    assert repr(found) == repr(expected)
    assert SamplingParams(top_k=-1.0).top_k == 0


@pytest.mark.parametrize("tag", [{"user": "ann"}, np.zeros(3), 12.5, "ann", [1]], ids=str)
def test_a_tag_is_carried_and_never_looked_at(tag) -> None:
    params = SamplingParams(tag=tag, max_tokens=3)
    asked = request("a", [1], params)
    assert asked.tag is tag
    assert asked.params.tag is tag
    assert params == SamplingParams(max_tokens=3)
    assert hash(params) == hash(SamplingParams(max_tokens=3))
    assert asked == request("a", [1], SamplingParams(max_tokens=3))
    assert (sampling_of(asked, 0) == sampling_of(request("a", [1], params), 0)).all()
    assert request("a", [1]).tag is None


def test_the_docstring_says_what_each_field_means() -> None:
    for field in attrs.fields(SamplingParams):
        assert f"\n    {field.name}: {field.metadata['help'][:30]}" in SamplingParams.__doc__
    assert "\n    n: answers to each prompt (1).\n" in SamplingParams.__doc__


@pytest.mark.parametrize(
    ("value", "expected"),
    [([1], True), ((), True), (range(3), True), ("ab", False), (b"ab", False), (None, False)],
)
def test_text_is_no_list(value, expected) -> None:
    assert is_list(value) is expected
    assert not is_list({1: 2})


@pytest.mark.parametrize(
    ("name", "column", "most"),
    [("top_k", "top_k", 0), ("min_tokens", "min_len", 2), ("logprobs", "n_logprobs", 0)],
)
def test_more_than_a_column_holds_is_no_limit(name, column, most) -> None:
    for value, expected in (
        (7, 7 + most),
        (2**31 - 1, 2**31 - 1),
        (2**31, 2**31 - 1),
        (2**63 - 1, 2**31 - 1),
    ):
        found = request("a", [1, 2], SamplingParams(**{name: value}))
        assert sampling_of(found, seed=0)[column] == expected
        assert getattr(found.params, name) == value


def test_unset_fields_take_the_defaults_given_then_ours() -> None:
    params = SamplingParams(top_p=0.5).resolve({"temperature": 0.3, "top_p": 0.9})
    assert (params.temperature, params.top_p, params.max_tokens) == (
        0.3,
        0.5,
        DEFAULTS["max_tokens"],
    )
    with pytest.raises(
        ValueError, match="request 1 leaves temperature, .* unset; pass params.resolve"
    ):
        Request(id=1, prompt=request(1, [1]).prompt, params=SamplingParams())


@pytest.mark.parametrize("stop_ids", [{-1}, {"a"}, [2.5]])
def test_bad_stop_ids_are_refused(stop_ids) -> None:
    with pytest.raises(ValueError, match="stop_ids is .*; give a list of token ids"):
        request("a", [1], stop_ids=stop_ids)


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
        (
            {"token_buckets": (2048,), "row_buckets": (65,), "max_model_len": 9},
            "pad by up to 2047 tokens",
        ),
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
