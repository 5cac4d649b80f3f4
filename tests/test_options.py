"""Options: each is said once, checked before anything loads, and a value like any other."""

from __future__ import annotations

import copy
import inspect
import pickle
import typing
from typing import Any

import attrs
import numpy as np
import pytest
import torch

import nva
from nva.loading.options import LoadOptions, Options, policy_of
from nva.state.policy import POLICIES

NAMES = [field.name for field in attrs.fields(Options)]


def test_each_option_says_what_it_means_and_its_default() -> None:
    for field in attrs.fields(Options):
        assert f"\n    {field.name}: {field.metadata['help'][:30]}" in Options.__doc__


def test_type_checkers_and_help_know_the_same_options() -> None:
    own, told = typing.get_type_hints(Options), typing.get_type_hints(LoadOptions)
    assert list(told) == NAMES
    converted = {"cache_memory": int | str | None}
    assert told == {**own, **converted}
    for function, first in ((nva.load, ["model"]), (nva.run, ["prompts", "params", "model"])):
        names = list(inspect.signature(function).parameters)
        assert names[: len(first)] == first
        assert names[-len(NAMES) :] == NAMES


@pytest.mark.parametrize("options", [{}, {"policy": "shortest", "cache_memory": "2GiB", "seed": 3}])
def test_options_can_be_sent_to_another_process(options: dict[str, Any]) -> None:
    made = Options(**options)
    assert pickle.loads(pickle.dumps(made)) == made == copy.deepcopy(made)
    assert attrs.evolve(made, max_rows=3) == Options(**options, max_rows=3)
    assert "<function" not in repr(made)


def test_a_policy_is_named_or_given() -> None:
    mine = nva.Policy(name="mine", init=lambda: None, step=lambda state, request, n: (state, -n))
    assert policy_of(Options(policy=mine)) is mine
    for name, policy in POLICIES.items():
        assert policy_of(Options(policy=name)) is policy
        assert policy_of(Options(policy=policy)) is policy


AMOUNTS = {
    "4GiB": 4 << 30,
    "4 GiB": 4 << 30,
    " 4gib ": 4 << 30,
    "4gb": 4 * 10**9,
    "4 GB": 4 * 10**9,
    "512MiB": 512 << 20,
    "512 mb": 512 * 10**6,
    "16kib": 16 << 10,
    "1TiB": 1 << 40,
    "1e9": 10**9,
    "1E9": 10**9,
    "1e+9 b": 10**9,
    "1000000": 10**6,
    "1000000B": 10**6,
    "1.5GiB": 3 << 29,
    ".5GiB": 1 << 29,
    10**9: 10**9,
    1e9: 10**9,
    0.3 * 2**33: int(0.3 * 2**33),
    np.int32(5000): 5000,
    np.float64(1e9): 10**9,
}


@pytest.mark.parametrize("given", AMOUNTS, ids=repr)
def test_memory_is_given_in_every_usual_way(given: Any) -> None:
    found = Options(cache_memory=given).cache_memory
    assert found == AMOUNTS[given]
    assert type(found) is int


NO_AMOUNTS = [
    "",
    " ",
    "GiB",
    "four GiB",
    "4XB",
    "4EB",
    "4GiBs",
    "4G",
    "4,5GiB",
    "1.2.3GiB",
    "1e-3GiB",
    "-4GiB",
    "+-4",
    "4GiB 2",
    "0x10",
    "1_000",
    "nan",
    "inf",
    "infGiB",
    "nanGiB",
    "1e999",
    "1e999GiB",
    "1e300GiB",
    "٤GiB",
    "4" * 400 + "GiB",
    "90%",
    0,
    -1,
    0.5,
    "0GiB",
    "0.1",
    float("nan"),
    float("inf"),
    2**63,
    10**400,
    True,
    b"4GiB",
    [4],
    {"GiB": 4},
    (4, "GiB"),
]


@pytest.mark.parametrize("given", NO_AMOUNTS, ids=lambda given: f"{given!r:.20}")
def test_what_is_no_amount_of_memory_is_refused_by_its_name(given: Any) -> None:
    with pytest.raises(ValueError, match=r"^cache_memory is .{1,81}; give ") as raised:
        Options(cache_memory=given)
    assert len(str(raised.value)) < 250


COUNTS = ["max_model_len", "max_rows", "max_batched_tokens", "block_size", "n_blocks", "seed"]


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_of_numpy_is_a_count(name: str) -> None:
    for kind in (np.int8, np.int32, np.int64, np.uint64):
        found = getattr(Options(**{name: kind(7)}), name)
        assert found == 7
        assert type(found) is int


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("given", [-1, 1.5, 8.0, "8", True, [8], float("nan"), 2**64, np.True_])
def test_what_is_no_count_is_refused_by_its_name(name: str, given: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} is .*; give a whole number"):
        Options(**{name: given})


@pytest.mark.parametrize("name", ["prefix_caching", "enforce_eager"])
@pytest.mark.parametrize("given", [0, 1, "true", "", None, [], np.True_])
def test_what_is_no_flag_is_refused_by_its_name(name: str, given: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} is .*; give True or False"):
        Options(**{name: given})


@pytest.mark.parametrize("name", ["policy", "graph"])
@pytest.mark.parametrize("given", ["", "FCFS", None, 3, ["fcfs"], {}, float("nan"), b"fcfs"])
def test_what_is_no_choice_is_refused_by_its_name(name: str, given: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} is .*; choose one of "):
        Options(**{name: given})


def test_objects_of_torch_are_names_too() -> None:
    assert Options(device=torch.device("cuda", 1)).device == "cuda:1"
    assert Options(dtype=torch.bfloat16) == pickle.loads(
        pickle.dumps(Options(dtype=torch.bfloat16))
    )


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("max_row", "max_rows"),
        ("max_num_seqs", "max_rows"),
        ("gpu_memory_utilization", "cache_memory"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_one(given: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"no '{given}'; did you mean {meant}?"):
        Options(**{given: 1})
