"""The families nva knows, by the architecture that a config.json names.

    @register("Qwen3ForCausalLM")
    def qwen3(config): return spec, weights

The law: a family is a function from a config to a ModelSpec and the names of its weights; nothing
else differs. Read next: llama.py, then qwen2.py and qwen3.py for what a second family takes;
docs/add_a_model.md for your own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nva.models.hf_config import Config
from nva.models.params import Weights
from nva.models.spec import ModelSpec
from nva.models.unread import check_all_read

Family = Callable[[Config], "tuple[ModelSpec, Weights]"]

FAMILIES: dict[str, Family] = {}
"""Architecture name -> family. Filled by `register`."""

VERIFIED: dict[str, tuple[str, ...]] = {}
"""Architecture name -> what the tests show of it, in words for `nva models`. A test holds them to
it."""

LOGITS = "logits equal to transformers'"
EMULATED = "NPU: schemas, emulated operators, lowering, compiled graphs executed"


def register(*architectures: str, verified: Sequence[str] = ()) -> Callable[[Family], Family]:
    """A decorator that makes a family known under these architecture names; a later one replaces an
    earlier one."""

    def add(family: Family) -> Family:
        FAMILIES.update(dict.fromkeys(architectures, family))
        VERIFIED.update(dict.fromkeys(architectures, tuple(verified)))
        return family

    return add


QUANTIZED = ("quantization_config", "compression_config", "quantization")
"""Settings that only quantized checkpoints have; the last is MLX's."""


def read_model(config: Mapping[str, Any]) -> tuple[ModelSpec, Weights]:
    """The spec and weight names of a config.json.

    Raises ValueError for an architecture that no family has registered, for quantized weights, for
    whatever the family refuses, and for what it doesn't read."""
    watched = Config(config)
    family = _find_family(watched)
    _check_unquantized(watched)
    found = family(watched)
    check_all_read(watched)
    return found


def _find_family(config: Config) -> Family:
    names = config.names("architectures", [])
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    code = " (its own code, named in auto_map, is never run)" if "auto_map" in config else ""
    raise ValueError(
        f"config.json names the architectures {list(names)}{code}; known are "
        f"{', '.join(sorted(FAMILIES))}. Add one with @nva.models.register"
    )


def _check_unquantized(config: Config) -> None:
    for key in QUANTIZED:
        settings = config.get(key)
        if settings:
            names = settings if isinstance(settings, Mapping) else {}
            raise ValueError(
                f"the checkpoint is quantized ({key}: {names.get('quant_method', 'unnamed')}), "
                "which nva can't read; take an unquantized one"
            )
