"""From a config.json to the rope of a layer, in every spelling.

The law: a setting that a kind of rope doesn't have, or that is given twice and differently, is an
error that names it. Read next: rope.py, the records that are made here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from nva.models.hf_config import Config
from nva.models.rope import KINDS, RopeSpec
from nva.models.unread import is_off
from nva.state.checks import is_number


def read_rope(config: Config, head_dim: int, layer_kind: str) -> RopeSpec:
    """The rope of the layers of one kind, in either spelling: `rope_theta` and `rope_scaling`
    (transformers 4), or `rope_parameters`, perhaps nested by layer kind (transformers 5).

    Raises ValueError for an unknown kind or setting, and for a missing one."""
    place, settings = _rope_settings(config, layer_kind)
    where = config.path + place
    kind = settings.pop("rope_type", "default")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(
            f"config.json: in {where}, rope type {kind!r:.80} is not known; known are "
            f"{', '.join(KINDS)}"
        )
    common = {
        "theta": _read_theta(where, kind, settings.pop("rope_theta", None)),
        "dim": _read_rope_dim(head_dim, settings.pop("partial_rotary_factor", 1.0)),
        "max_position": config.size("max_position_embeddings"),
    }
    return _make_rope(where, kind, common, settings)


def _make_rope(
    where: str, kind: str, common: Mapping[str, Any], settings: Mapping[str, Any]
) -> RopeSpec:
    """The record of a kind of rope: the fields that all have, and its own, which config.json calls
    by the same names."""
    own = [field for field in attrs.fields(KINDS[kind]) if field.name not in common]
    names = {field.name for field in own}
    needed = {field.name for field in own if field.default is attrs.NOTHING}

    # transformers writes the original length for every kind; without it, that is the declared one.
    settings = {"original_max_position_embeddings": common["max_position"], **settings}
    if missing := needed - settings.keys():
        raise ValueError(
            f"rope type {kind!r} needs {', '.join(sorted(missing))}, which {where} in config.json "
            "doesn't give"
        )
    beside = settings.keys() - names - {"original_max_position_embeddings"}
    if unknown := {name for name in beside if not is_off(name, settings[name])}:
        raise ValueError(
            f"rope type {kind!r} has no setting {', '.join(sorted(unknown))}, which {where} in "
            "config.json gives; remove what has no effect"
        )
    try:
        return KINDS[kind](**common, **{name: settings[name] for name in names & settings.keys()})
    except ValueError as error:
        raise ValueError(f"config.json: in {where}, {error}") from error


def _read_theta(where: str, kind: str, value: Any) -> float:
    if value is None:
        raise ValueError(
            f"rope type {kind!r} needs rope_theta, which config.json doesn't give, neither in "
            f"{where} nor beside it"
        )
    if not is_number(value) or not 1 <= value < math.inf:
        raise ValueError(
            f"config.json has rope_theta = {value!r:.80}; it must be a finite number of at least 1"
        )
    return float(value)


def _read_rope_dim(head_dim: int, share: Any) -> int:
    """How many numbers of each head turn."""
    if not is_number(share) or not 0 < share <= 1:
        raise ValueError(
            f"config.json has partial_rotary_factor = {share!r:.80}; it must be a number above 0, "
            "at most 1"
        )
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise ValueError(
            f"config.json has heads of {head_dim} numbers (head_dim, or hidden_size / "
            f"num_attention_heads) and partial_rotary_factor = {share}: the rope turns {dim} "
            "numbers of each head; it takes an even number, at least 2"
        )
    return dim


def _rope_settings(config: Config, layer_kind: str) -> tuple[str, dict[str, Any]]:
    """The rope settings of the layers of a kind, and the name of the object they stand in. null
    counts as absent; what stands inside the object goes before what stands beside it."""
    new, old = (_rope_of(config, name, layer_kind) for name in ("rope_parameters", "rope_scaling"))
    names = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    beside = present({name: config.get(name) for name in names})
    place = " and ".join(name for name in ("rope_parameters", "rope_scaling") if config.get(name))
    return place or "rope_parameters", beside | merged_ropes(config, new, old)


def _rope_of(config: Config, name: str, layer_kind: str) -> Mapping[str, Any]:
    """The settings that one object has for the layers of a kind."""
    group = config.group(name)
    inner = group.get(layer_kind, group)
    if not isinstance(inner, Mapping):
        config.refuse(name, f"an object with settings, as is {layer_kind} in it")
    return inner


def merged_ropes(config: Config, new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of both spellings of one rope. Raises ValueError where they contradict each
    other."""
    new, old = present(new), present(old)
    for each in (new, old):
        kind = each.pop("type", None)
        if kind is not None and each.setdefault("rope_type", kind) != kind:
            raise ValueError(
                f"config.json has a rope with {config.path}rope_type {each['rope_type']!r:.80} and "
                f"type {kind!r:.80}, in rope_parameters or rope_scaling; remove one"
            )
    for name in new.keys() & old.keys():
        if new[name] != old[name]:
            raise ValueError(
                f"config.json has both {config.path}rope_parameters and {config.path}rope_scaling, "
                f"which disagree on {name}: {new[name]!r:.80} and {old[name]!r:.80}; remove one"
            )
    return new | old


def present(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not null."""
    return {name: value for name, value in settings.items() if value is not None}
