"""generation_config.json: what can be read is a default, all else is refused by its own name."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest

import nva
from nva.loading.defaults import read_defaults

READ = [
    ({}, {}),
    ({"temperature": None, "top_k": None, "do_sample": None, "max_new_tokens": None}, {}),
    (
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    ),
    ({"temperature": 1, "top_p": 1}, {"temperature": 1, "top_p": 1}),
    ({"top_k": 50.0}, {"top_k": 50}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"top_k": -1.0}, {"top_k": 0}),
    ({"max_new_tokens": 2048.0}, {"max_tokens": 2048}),
    ({"do_sample": False}, {"temperature": 0.0}),
    ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
    ({"do_sample": True, "temperature": 0}, {"temperature": 0}),
    ({"max_length": "x", "num_beams": [], "eos_token_id": -1, "pad_token_id": None}, {}),
]


@pytest.mark.parametrize(("config", "expected"), READ, ids=str)
def test_what_can_be_read_is_a_default(config: dict[str, Any], expected: dict[str, Any]) -> None:
    found = read_defaults(config)
    assert found == expected
    assert all(type(found[name]) is type(expected[name]) for name in found)
    resolved = nva.SamplingParams().resolve(found)
    assert {name: getattr(resolved, name) for name in expected} == expected


ODD = {
    "temperature": [-1, "0.7", math.nan, math.inf, [0.7], {}, True, 10**400],
    "top_p": [0, 0.0, -0.1, 1.1, "0.9", math.nan, False, [0.9]],
    "top_k": [-2, 50.5, "50", [50], True, math.nan, math.inf, 10**30],
    "min_p": [-0.1, 1.5, "0.1", True, {}],
    "repetition_penalty": [0, -1.0, "1.1", math.inf, [1.1]],
    "max_new_tokens": [0, -5, 20.5, "20", True, [20], math.inf],
    "do_sample": ["false", "true", 0, 1, 1.0, [], {}, "no"],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in ODD.items() for v in values])
def test_what_can_not_be_used_is_refused_by_its_own_name(name: str, value: Any) -> None:
    with pytest.raises(
        ValueError, match=f"^generation_config.json has {name} = .*; give"
    ) as raised:
        read_defaults({name: value})
    assert "remove it there" in str(raised.value)


def test_each_default_is_of_a_field_that_can_be_unset() -> None:
    config = {"temperature": 1, "top_k": 1, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    found = read_defaults({**config, "max_new_tokens": 5})
    fields = attrs.fields_dict(nva.SamplingParams)
    assert all(fields[name].default is None for name in found)
