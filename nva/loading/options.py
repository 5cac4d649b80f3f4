"""How to load a model: the record of every option, and how each is checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import attrs
from attrs.validators import optional

from nva.kernels import GRAPHS
from nva.state.checks import LARGEST_INT32, flag, knows_names, whole
from nva.state.policy import POLICIES, Policy

if TYPE_CHECKING:
    pass
_OTHER_NAMES = {
    "max_num_seqs": "max_rows",
    "max_num_batched_tokens": "max_batched_tokens",
    "gpu_memory_utilization": "cache_memory",
    "num_gpu_blocks_override": "n_blocks",
    "enable_prefix_caching": "prefix_caching",
    "torch_dtype": "dtype",
    "scheduling_policy": "policy",
}
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def _policy(value: str | Policy) -> Policy:
    if isinstance(value, Policy):
        return value
    if not isinstance(value, str) or value not in POLICIES:
        raise ValueError(
            f"policy is {value!r}; choose one of {', '.join(POLICIES)}, or give a nva.Policy"
        )
    return POLICIES[value]


def _bytes(value: int | str | None) -> int | None:
    """A number of bytes, as itself or as "4GiB"."""
    if not isinstance(value, str):
        return value
    number, unit = next(
        ((value.removesuffix(unit), n) for unit, n in _UNITS.items() if value.endswith(unit)),
        ("", 0),
    )
    try:
        return int(float(number) * unit)
    except (ValueError, OverflowError):
        raise ValueError(
            f'memory is {value!r}; give bytes, or a number with a unit, such as "4GiB"'
        ) from None


def _graph(_: object, field: attrs.Attribute[str], value: str) -> None:
    if value not in GRAPHS:
        raise ValueError(f"{field.name} is {value!r}; choose one of {', '.join(GRAPHS)}")


_SIZE = whole(1, LARGEST_INT32)


class LoadOptions(TypedDict, total=False):
    """The fields of Options, for the checkers of types."""

    dtype: str
    device: str
    block_size: int | None
    n_blocks: int | None
    cache_memory: int | str | None
    max_batched_tokens: int
    max_rows: int
    max_model_len: int | None
    prefix_caching: bool
    enforce_eager: bool
    graph: str
    policy: str | Policy
    seed: int


@knows_names("load()", _OTHER_NAMES)
@attrs.frozen(kw_only=True)
class Options:
    """How to load a model.

    dtype: float32, bfloat16, float16, or auto for the checkpoint's own. device: cpu, cuda, npu,
    npu:1, ..., or auto for the best one here. block_size: tokens a block of the cache holds.
    n_blocks, or cache_memory (bytes, or "4GiB"): size of the cache; by default what max_rows of
    full length need, up to a third of the memory that is free. max_batched_tokens: tokens a step
    computes at most. max_rows: sequences that run at once. max_model_len: tokens of prompt and
    answer together, by default the model's own. prefix_caching: keep and find the blocks of common
    prefixes. enforce_eager: never compile. graph: how an NPU runs the forward: auto, eager, ge or
    aclgraph (docs/npu.md). policy: fcfs, priority, shortest, or a Policy. seed: of the requests
    that bring none."""

    dtype: str = "auto"
    device: str = attrs.field(default="auto", converter=str)
    block_size: int | None = attrs.field(default=None, validator=optional(_SIZE))
    n_blocks: int | None = attrs.field(default=None, validator=optional(_SIZE))
    cache_memory: int | None = attrs.field(
        default=None, converter=_bytes, validator=optional(whole(1))
    )
    max_batched_tokens: int = attrs.field(default=2048, validator=_SIZE)
    max_rows: int = attrs.field(default=256, validator=_SIZE)
    max_model_len: int | None = attrs.field(
        default=None, validator=optional(whole(2, LARGEST_INT32))
    )
    prefix_caching: bool = attrs.field(default=True, validator=flag)
    enforce_eager: bool = attrs.field(default=False, validator=flag)
    graph: str = attrs.field(default="auto", validator=_graph)
    policy: Policy = attrs.field(default="fcfs", converter=_policy)
    seed: int = attrs.field(default=0, validator=whole(0))

    def __attrs_post_init__(self) -> None:
        if self.n_blocks is not None and self.cache_memory is not None:
            raise ValueError("n_blocks and cache_memory both size the cache; give one of them")
        if self.enforce_eager and self.graph not in ("auto", "eager"):
            raise ValueError(
                f"enforce_eager never compiles, but graph is {self.graph!r}; give one of them"
            )
