"""A config.json with odd values: it is read, or a ValueError names config.json, the setting and what it is.

Nothing else may be raised, whatever stands where; and a spec that was read can be computed."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nva.models import ModelSpec, open_checkpoint
from nva.models.checkpoint import eos_ids, named_dtype
from nva.models.hf_config import Config
from nva.models.params import all_tables
from nva.models.registry import FAMILIES, read_model
from tests.models.hub import CONFIGS, shrunk

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32, "mscale": 1.0}
YARN |= {"original_max_position_embeddings": 16, "truncate": True, "attention_factor": 1.2}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 10, "long_factor": [2.0] * 10}
LONGROPE |= {"original_max_position_embeddings": 16, "factor": 2.0, "rope_theta": 1e4}

NAMES = ["Llama 3.2 1B", "SmolLM2", "Mistral 7B 0.1", "Qwen 2.5, long", "Qwen 2 57B", "Qwen 3 0.6B"]
NAMES += ["Qwen 3 Coder 30B", "Gemma 3 1B", "Gemma 3 270M", "MiniCPM4 8B"]
NAMES += ["Qwen 3 VL 4B", "Qwen 3 VL 30B"]
SMALL = {name: shrunk(CONFIGS[name]) for name in NAMES}
SMALL |= {
    "windows": SMALL["Qwen 3 0.6B"] | {"use_sliding_window": True, "sliding_window": 5},
    "yarn": SMALL["Qwen 3 0.6B"] | {"rope_theta": None, "rope_parameters": YARN},
    "longrope": SMALL["Qwen 3 0.6B"] | {"rope_theta": None, "rope_parameters": LONGROPE},
    "dynamic": SMALL["Qwen 3 0.6B"] | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
}

ODD = [None, True, False, 0, 1, -1, 3, 7, 2**40, 10**400]
ODD += [0.5, 64.0, 3.0, -0.0, math.nan, math.inf, -math.inf, 1e308, 5e-324]
ODD += ["", "64", "silu", "-1", "\x00", [], [1], [None], ["x"], [[1]], {}, {"a": 1}, {"": None}]


def keys_of(config: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The paths of all settings, those inside others too."""
    found = []
    for name, value in config.items():
        found.append((*path, name))
        if isinstance(value, dict):
            found += keys_of(value, (*path, name))
    return found


def with_value(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    name, *rest = path
    inner = with_value(config.get(name) or {}, tuple(rest), value) if rest else value
    return {**config, name: inner}


def without(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    name, *rest = path
    if rest:
        return {**config, name: without(config[name], tuple(rest))}
    return {key: value for key, value in config.items() if key != name}


def read(config: dict[str, Any]) -> ModelSpec | ValueError:
    """The spec, or the error that refuses the config."""
    try:
        spec, _ = read_model(config)
    except ValueError as error:
        return error
    for rope in spec.ropes:
        frequencies, scale = rope.frequencies(64)
        assert frequencies.shape == (rope.dim // 2,)
        assert frequencies.isfinite().all() and math.isfinite(scale)
        assert rope.reach >= 1
    if spec.n_layers < 10:
        list(all_tables(spec))
    return spec


def read_names(config: dict[str, Any]) -> set[str]:
    """The settings that the family reads, whether or not this config has them."""
    watched = Config(config)
    FAMILIES[config["architectures"][0]](watched)
    return watched.known - {"architectures"}


def names(error: ValueError, config: dict[str, Any], path: tuple[str, ...], value: Any) -> bool:
    """Whether an error names the setting or, where the value is of the right type, one that it is at
    odds with."""
    if path[-1] in str(error) or (len(path) > 1 and path[0] in str(error)):
        return True
    usual = functools.reduce(lambda inner, name: inner.get(name) or {}, path, config)
    is_alike = isinstance(value, (int, float)) and isinstance(usual, (int, float, dict))
    is_alike |= isinstance(value, dict) and isinstance(usual, dict)
    return is_alike and any(other[-1] in str(error) for other in keys_of(config))


@pytest.mark.parametrize("name", SMALL)
def test_every_setting_with_every_odd_value(name: str) -> None:
    config = SMALL[name]
    assert isinstance(read(config), ModelSpec)
    paths = dict.fromkeys([*keys_of(config), *((each,) for each in read_names(config))])
    n_refused = 0
    for path in paths:
        for value in ODD:
            found = read(with_value(config, path, value))
            if isinstance(found, ValueError):
                n_refused += 1
                assert names(found, config, path, value), (path, value, found)
                assert len(str(found)) < 900, (path, value)
    assert n_refused > 100


@pytest.mark.parametrize("name", SMALL)
def test_every_setting_left_out(name: str) -> None:
    for path in keys_of(SMALL[name]):
        found = read(without(SMALL[name], path))
        if isinstance(found, ValueError):
            assert path[-1] in str(found) or path[0] in str(found), (path, found)


JSON = st.recursive(
    st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)


@given(st.sampled_from(sorted(SMALL)), st.data())
def test_several_odd_values_at_once(name: str, data: st.DataObject) -> None:
    config = SMALL[name]
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(keys_of(SMALL[name])))
        try:
            config = with_value(config, path, data.draw(JSON))
        except (AttributeError, TypeError):
            return  # what the path leads through was replaced before
    found = read(config)
    assert isinstance(found, (ModelSpec, ValueError))
    try:
        named_dtype(config)
        eos_ids(config, "config.json")
    except ValueError as error:
        assert "config.json" in str(error)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("head_dim", None, "config.json has no 'head_dim', which Qwen3ForCausalLM needs"),
        ("hidden_size", "48", "config.json has hidden_size = '48'; it must be a whole number"),
        ("hidden_size", 48.5, "hidden_size = 48.5; it must be a whole number"),
        ("num_hidden_layers", True, "num_hidden_layers = True; it must be a whole number"),
        ("num_hidden_layers", 10**9, "num_hidden_layers = 10+; it must be .* at most 10000"),
        ("rms_norm_eps", "1e-6", "rms_norm_eps = '1e-6'; it must be a finite number above 0"),
        ("rope_theta", -1, "rope_theta = -1; it must be a finite number of at least 1"),
        ("attention_bias", "false", "attention_bias = 'false'; it must be true or false"),
        ("tie_word_embeddings", 2, "tie_word_embeddings = 2; it must be true or false"),
        ("architectures", "Qwen3ForCausalLM", "architectures = 'Qwen3.*'; it must be a list of names"),
        ("rope_scaling", [4.0], r"rope_scaling = \[4.0\]; it must be an object with settings"),
        ("layer_types", [1, 2, 3], r"layer_types = \[1, 2, 3\]; it must be a list of names"),
        ("num_attention_heads", 5, "num_attention_heads = 5 .*num_key_value_heads = 2.* evenly"),
        ("num_key_value_heads", -2, "num_key_value_heads = -2; it must be a whole number"),
        ("partial_rotary_factor", 1.5, "partial_rotary_factor = 1.5; it must be a number above 0"),
    ],
)  # fmt: skip
def test_messages_name_the_setting_its_value_and_what_is_allowed(
    setting: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_model(SMALL["Qwen 3 0.6B"] | {setting: value})


def test_whole_numbers_may_be_written_as_floats() -> None:
    config = SMALL["Qwen 3 Coder 30B"]
    written = {
        name: float(value) if isinstance(value, int) and not isinstance(value, bool) else value
        for name, value in config.items()
    }
    assert read_model(written)[0] == read_model(config)[0]


def test_settings_of_inner_configs_are_named_with_their_path() -> None:
    config = with_value(SMALL["Qwen 3 VL 4B"], ("text_config", "hidden_size"), "48")
    with pytest.raises(ValueError, match="has text_config.hidden_size = '48'"):
        read_model(config)
    config = with_value(SMALL["Qwen 3 VL 4B"], ("vision_config", "depth"), [])
    with pytest.raises(ValueError, match=r"has vision_config.depth = \[\]"):
        read_model(config)
    with pytest.raises(ValueError, match="vision_config = 3; it must be an object"):
        read_model(SMALL["Qwen 3 VL 4B"] | {"vision_config": 3})


@pytest.mark.parametrize(
    ("given", "found"),
    [(None, set()), (-1, set()), ([], set()), (7, {7}), ([7, 9], {7, 9}), (7.0, {7}), ([-1, 0], {0})],
)  # fmt: skip
def test_ids_of_the_end_of_sequence(given: Any, found: set[int]) -> None:
    assert eos_ids({"eos_token_id": given}, "config.json") == found
    assert eos_ids({}, "config.json") == set()


@pytest.mark.parametrize(
    "given", [-2, True, "2", "</s>", 2.5, math.nan, math.inf, [None], [[2]], ["2"], [True], {"a": 2}, [2, -7]]
)  # fmt: skip
def test_what_is_no_id_of_the_end_of_sequence(given: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^config\.json has eos_token_id = .*; it must be a token id"
    ):
        eos_ids({"eos_token_id": given}, "config.json")


def test_ids_of_the_end_of_sequence_are_checked_when_a_checkpoint_is_opened(tmp_path: Path) -> None:
    config = SMALL["Qwen 3 VL 4B"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(tmp_path).eos_ids == {2}  # it stands in text_config
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert open_checkpoint(tmp_path).eos_ids == {2, 3, 4}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["3"]}')
    with pytest.raises(ValueError, match=r"generation_config\.json has eos_token_id = \['3'\]"):
        open_checkpoint(tmp_path)


def test_a_rope_in_both_spellings_must_be_one() -> None:
    config = SMALL["Qwen 3 0.6B"]
    both = {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}
    one, _ = read_model(config | {"rope_theta": None, "rope_parameters": both})
    same, _ = read_model(
        config | {"rope_parameters": both, "rope_scaling": {"type": "linear", "factor": 2.0}}
    )
    assert one == same
    plain = {"rope_theta": 1e4, "rope_type": "default"}
    with pytest.raises(ValueError, match="both rope_parameters and rope_scaling, .* on rope_type"):
        read_model(
            config | {"rope_parameters": plain, "rope_scaling": {"type": "linear", "factor": 2}}
        )
    beside, _ = read_model(
        config
        | {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear", "factor": 2}}
    )
    assert beside == one


def test_settings_that_a_rope_does_not_have_may_be_off() -> None:
    config = SMALL["Qwen 3 0.6B"]
    plain = {"rope_type": "default", "factor": 1.0, "beta_fast": None, "mrope_section": []}
    assert read_model(config | {"rope_scaling": plain}) == read_model(config)
    for name, value in {"factor": 2.0, "theta": 5.0, "dim": 4, "finetuned": True}.items():
        with pytest.raises(ValueError, match=f"rope type 'default' has no setting {name}"):
            read_model(config | {"rope_scaling": plain | {name: value}})


@pytest.mark.parametrize("off", [None, 0, False])
def test_a_window_of_nothing_is_none(off: Any) -> None:
    config = SMALL["Mistral 7B 0.1"] | {"sliding_window": off}
    assert set(read_model(config)[0].windows) == {None}
    llama = SMALL["SmolLM2"]
    assert read_model(llama | {"sliding_window": off}) == read_model(llama)


def test_a_shared_expert_of_no_size_is_none() -> None:
    config = SMALL["Qwen 2 57B"] | {"shared_expert_intermediate_size": 0}
    (experts,) = set(read_model(config)[0].experts)
    assert experts is not None
    assert experts.shared_size == 0


def test_frequencies_at_the_edges_are_finite() -> None:
    for name, config in SMALL.items():
        for rope in read_model(config)[0].ropes:
            for length in (1, 24, 10_000_000):
                frequencies, scale = rope.frequencies(length)
                assert torch.isfinite(frequencies).all(), name
                assert scale > 0
