"""The families nva knows, by the architecture that a config.json names.

    @register("Qwen3ForCausalLM")
    def qwen3(config): return spec, weights

The law: a family is a function from a config to a ModelSpec and the names of its weights; nothing
else differs. Read next: llama.py, then qwen2.py and qwen3.py for what a second family takes;
docs/add_a_model.md for your own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nva.models.hf_config import Config, check_all_read
from nva.models.params import Weights
from nva.models.spec import ModelSpec

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


def read_model(config: Mapping[str, Any]) -> tuple[ModelSpec, Weights]:
    """The spec and weight names of a config.json.

    Raises ValueError for an architecture that no family has registered, for quantized weights, for
    whatever the family refuses, and for what it doesn't read."""
    names = config.get("architectures") or []
    family = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if family is None:
        code = " (its own code, named in auto_map, is never run)" if "auto_map" in config else ""
        raise ValueError(
            f"config.json names the architectures {names}{code}; known are "
            f"{', '.join(sorted(FAMILIES))}. "
            "Add one with @nva.models.register"
        )
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            settings = config[key] if isinstance(config[key], Mapping) else {}
            method = settings.get("quant_method", "unnamed")
            raise ValueError(
                f"the checkpoint is quantized ({key}: {method}), which nva can't read; take an "
                "unquantized one"
            )
    watched = Config(config)
    found = family(watched)
    check_all_read(watched)
    return found
