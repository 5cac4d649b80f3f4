"""How to load a model: the record of every option, what it means, and how it is checked.

The law: what an option means is said once, in its field's metadata; the docstring, help() and the
command line show that. Read next: load.py, which follows the options.
"""

from __future__ import annotations

import math
import re
from typing import Any, TypedDict

import attrs
from attrs.validators import optional

from nva.kernels import GRAPHS
from nva.state.checks import (
    LARGEST_INT32,
    as_python,
    described,
    flag,
    is_number,
    knows_names,
    whole,
)
from nva.state.policy import POLICIES, Policy

OTHER_NAMES = {
    "max_num_seqs": "max_rows",
    "max_num_batched_tokens": "max_batched_tokens",
    "gpu_memory_utilization": "cache_memory",
    "num_gpu_blocks_override": "n_blocks",
    "enable_prefix_caching": "prefix_caching",
    "torch_dtype": "dtype",
    "scheduling_policy": "policy",
}
"""What other engines call an option."""

_UNITS = {
    **{"": 1, "b": 1},
    **{f"{letter}b": 1000**i for i, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**i for i, letter in enumerate("kmgt", 1)},
}
_AMOUNT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e\+?[0-9]+)?)\s*([a-z]*)\s*", re.ASCII)


def _policy(_: object, field: attrs.Attribute[Any], value: Any) -> None:
    is_known = isinstance(value, str) and value in POLICIES
    if not is_known and not isinstance(value, Policy):
        raise ValueError(
            f"{field.name} is {value!r}; choose one of {', '.join(POLICIES)}, or give a nva.Policy"
        )


def _bytes(value: Any) -> Any:
    """A number of bytes, as itself or as "4GiB", "4 gb" or "1e9". What is neither is left to the
    validator."""
    if is_number(value) and math.isfinite(value):
        return int(value)
    if not isinstance(value, str):
        return value
    found = _AMOUNT.fullmatch(value.lower())
    unit = _UNITS.get(found[2], math.nan) if found else math.nan
    amount = float(found[1]) * unit if found else math.nan
    if not math.isfinite(amount):
        raise ValueError(
            f'cache_memory is {value!r:.80}; give bytes, or a number with a unit, such as "4GiB"'
        )
    return int(amount)


def _graph(_: object, field: attrs.Attribute[str], value: Any) -> None:
    if value not in GRAPHS:
        raise ValueError(f"{field.name} is {value!r}; choose one of {', '.join(GRAPHS)}")


def _option(text: str, **options: Any) -> Any:
    """A field, with what it means."""
    return attrs.field(metadata={"help": text}, **options)


def _size(text: str, default: int | None, low: int = 1) -> Any:
    """A field for a count that fits the engine's columns; it may be None where that is the
    default."""
    check = whole(low, LARGEST_INT32)
    check = optional(check) if default is None else check
    return _option(text, default=default, converter=as_python, validator=check)


class LoadOptions(TypedDict, total=False):
    """The fields of Options, for the checkers of types."""

    dtype: str
    device: str
    max_model_len: int | None
    max_rows: int
    max_batched_tokens: int
    block_size: int | None
    n_blocks: int | None
    cache_memory: int | str | None
    prefix_caching: bool
    enforce_eager: bool
    graph: str
    policy: str | Policy
    seed: int


@described
@knows_names("load()", OTHER_NAMES)
@attrs.frozen(kw_only=True)
class Options:
    """How to load a model."""

    dtype: str = _option(
        "type of weights and cache: float32, bfloat16, float16, or auto for the checkpoint's own",
        default="auto",
    )
    device: str = _option(
        "cpu, cuda, npu, cuda:1, npu:1, ..., or auto for the best one here",
        default="auto",
        converter=str,
    )
    max_model_len: int | None = _size(
        "tokens of prompt and answer together, by default what the model allows", None, low=2
    )
    max_rows: int = _size("sequences that are computed at once", 256)
    max_batched_tokens: int = _size("tokens computed in one step at most", 2048)
    block_size: int | None = _size("tokens that a block of the KV cache holds", None)
    n_blocks: int | None = _size(
        "blocks of the KV cache; by default what max_rows sequences of usual length need, in a "
        "part of the memory that is free",
        None,
    )
    cache_memory: int | None = _option(
        'or the memory for these blocks, in bytes or such as "4GiB"',
        default=None,
        converter=_bytes,
        validator=optional(whole(1)),
    )
    prefix_caching: bool = _option(
        "keep what was computed, and find it again where prompts begin alike",
        default=True,
        validator=flag,
    )
    enforce_eager: bool = _option("never compile the forward", default=False, validator=flag)
    graph: str = _option(
        f"how an NPU runs the forward: {', '.join(GRAPHS)} (docs/npu.md)",
        default="auto",
        validator=_graph,
    )
    policy: str | Policy = _option(
        f"who goes first: {', '.join(POLICIES)}, or a nva.Policy", default="fcfs", validator=_policy
    )
    seed: int = _option(
        "of the requests that bring none: another seed gives other answers",
        default=0,
        converter=as_python,
        validator=whole(0),
    )

    def __attrs_post_init__(self) -> None:
        if self.n_blocks is not None and self.cache_memory is not None:
            raise ValueError("n_blocks and cache_memory both size the cache; give one of them")
        if self.enforce_eager and self.graph not in ("auto", "eager"):
            raise ValueError(
                f"enforce_eager never compiles, but graph is {self.graph!r}; give one of them"
            )


def policy_of(options: Options) -> Policy:
    """The policy that an option names."""
    return options.policy if isinstance(options.policy, Policy) else POLICIES[options.policy]
