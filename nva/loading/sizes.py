"""How large everything is: the limits of a model on a device, the blocks that its memory holds, and
whether all of it fits.

The law: what doesn't fit into memory is refused before it is taken. Much of it is taken only as it
is first written, so the system would agree to any size, and end the process later.
Read next: load.py, which asks; kernels/host_memory.py for what is free.
"""

from __future__ import annotations

import math

import attrs
import torch

from nva.forward import KV, cache_shape, empty_kv
from nva.host.messages import say
from nva.kernels import Device
from nva.kernels.host_memory import free_memory
from nva.loading.options import Options, policy_of
from nva.models.params import all_tables
from nva.models.spec import ModelSpec
from nva.state.checks import LARGEST_INT32
from nva.state.engine import EngineState, empty
from nva.state.limits import Limits, blocks_for
from nva.state.rows import TABLES, empty_rows

USUAL_TOKENS = 65_536
"""Tokens that the default cache holds at most in the host's memory, which other programs want too,
if max_rows sequences of USUAL_LEN need no more."""
USUAL_LEN = 256
LONG_LEN = 131_072
"""Up to this length the tables of positions and of rows cost some 200 MB, and are made for the
whole length of a model."""
BLOCK_BYTES = 200
"""What the state keeps of a block, measured."""
ADVICE = "lower max_rows, max_model_len, or n_blocks and cache_memory"


def limits_of(spec: ModelSpec, options: Options, device: Device, dtype: torch.dtype) -> Limits:
    """The limits. The number of blocks is 1 where neither it nor the memory for them is given, and
    is found once the weights are there."""
    block_size = options.block_size or device.block_size
    max_model_len = options.max_model_len or _default_len(spec, options, device, dtype)
    if max_model_len > spec.reach:
        raise ValueError(
            f"max_model_len is {max_model_len}; the model's positions reach {spec.reach}; set rope "
            "scaling in its config.json to go further"
        )
    max_batched_tokens = min(options.max_batched_tokens, options.max_rows * max_model_len)
    token_buckets, row_buckets = device.buckets(max_batched_tokens, options.max_rows, max_model_len)
    return Limits(
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        n_blocks=_n_blocks_given(spec, options, block_size, dtype, device) or 1,
        block_size=block_size,
        max_rows=options.max_rows,
        max_batched_tokens=max_batched_tokens,
        position_axes=3 if spec.rope_axes else 1,
        prefix_caching=options.prefix_caching,
        token_buckets=token_buckets,
        row_buckets=row_buckets,
    )


def _default_len(spec: ModelSpec, options: Options, device: Device, dtype: torch.dtype) -> int:
    """The model's own length, or a very long model's as far as the cache could hold it: tables of
    ten million positions cost gigabytes, and no sequence would ever reach their end."""
    longest = spec.max_position
    if longest <= LONG_LEN:
        return longest
    block_size = options.block_size or device.block_size
    n_blocks = _n_blocks_given(spec, options, block_size, dtype, device)
    if n_blocks is None:
        memory = device.cache_memory(device.where)
        n_blocks = memory // block_bytes(spec, block_size, dtype, device)
    n_tokens = n_blocks * block_size
    length = min(longest, max(LONG_LEN, n_tokens))
    if length == longest or not _turns_alike(spec, length, longest):
        return longest
    say(
        f"max_model_len is {length}, not the model's {longest}, which the KV cache can't hold; "
        "give max_model_len, and cache_memory, for more"
    )
    return length


def _turns_alike(spec: ModelSpec, length: int, other: int) -> bool:
    """Whether the ropes turn alike at both lengths. Some kinds depend on max_model_len, and the
    answers must not depend on the memory that happened to be free."""
    for rope in spec.ropes:
        (short, scale), (long, other_scale) = map(rope.frequencies, (length, other))
        if scale != other_scale or not torch.equal(short, long):
            return False
    return True


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype, device: Device) -> int:
    """Bytes of a block's keys and values, in all layers."""
    shape = cache_shape(spec, block_size, n_ids=1)
    return 2 * spec.n_layers * device.cache_bytes(shape, dtype)


def _n_blocks_given(
    spec: ModelSpec, options: Options, block_size: int, dtype: torch.dtype, device: Device
) -> int | None:
    """The blocks that the options ask for, by their number or by the memory for them."""
    if options.cache_memory is None:
        return options.n_blocks
    return _n_held(options.cache_memory, block_bytes(spec, block_size, dtype, device))


def default_n_blocks(spec: ModelSpec, limits: Limits, dtype: torch.dtype, device: Device) -> int:
    """The blocks that are needed, in the part of the free memory that a cache may take."""
    memory = device.cache_memory(device.where)
    n_held = _n_held(memory, block_bytes(spec, limits.block_size, dtype, device))
    return min(n_held, _n_needed(limits, device))


def _n_held(memory: int, bytes_of_one: int) -> int:
    """Blocks that so much memory holds, scratch blocks not counted."""
    if memory < bytes_of_one:
        raise ValueError(
            f"the cache's memory, {memory} bytes, holds no block of {bytes_of_one} bytes; raise "
            "cache_memory"
        )
    return memory // bytes_of_one


def _n_needed(limits: Limits, device: Device) -> int:
    """Blocks that max_rows sequences of full length need. In the host's own memory a usual number
    is enough, which holds one sequence of full length."""
    longest = blocks_for(limits.max_model_len, limits.block_size)
    all_full = limits.max_rows * longest
    if not device.is_host:
        return all_full
    usual_tokens = max(USUAL_TOKENS, limits.max_rows * USUAL_LEN)
    return min(all_full, max(blocks_for(usual_tokens, limits.block_size), longest))


def check_memory(
    spec: ModelSpec,
    limits: Limits,
    dtype: torch.dtype,
    device: Device,
    *,
    with_weights: bool,
) -> None:
    """Raise ValueError if the host's memory can't hold what is still to be made: the cache and the
    weights where they lie there, and the tables of rows, blocks and positions."""
    n_ids = limits.n_scratch + limits.n_blocks
    if n_ids * limits.block_size > LARGEST_INT32:
        raise ValueError(
            f"the cache has {limits.n_blocks} blocks of {limits.block_size} tokens, more than "
            f"slots can be numbered; {ADVICE}"
        )
    try:
        free = free_memory()
    except ValueError:  # a system that doesn't tell: it is left to refuse what it can't give
        return
    weights = weights_bytes(spec, dtype) if with_weights and device.is_host else 0
    cache = n_ids * block_bytes(spec, limits.block_size, dtype, device) if device.is_host else 0
    tables = _row_bytes(limits) + n_ids * BLOCK_BYTES + _position_bytes(spec, limits)
    if weights > free:
        raise ValueError(
            f"the weights, {gib(weights)} in {str(dtype).removeprefix('torch.')}, don't fit into "
            f"memory, of which {gib(free)} are free (a container's limit counted); take a smaller "
            "model, or more memory"
        )
    if weights + cache + tables > free:
        beside = f", beside weights of {gib(weights)}," if weights else ""
        raise ValueError(
            f"{limits.max_rows} rows of up to {limits.max_model_len} tokens ({gib(tables)} of "
            f"tables) and a cache of {limits.n_blocks} blocks ({gib(cache)}){beside} don't fit "
            f"into memory, of which {gib(free)} are free (a container's limit counted); {ADVICE}"
        )


def weights_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of all parameters, each counted once."""
    shapes = [param.shape for _, table in all_tables(spec) for param in table.values()]
    return sum(map(math.prod, shapes)) * dtype.itemsize


def _row_bytes(limits: Limits) -> int:
    """Bytes of the state's rows: those of one row's columns, and two lines for it in each table."""
    one = attrs.evolve(limits, max_rows=1, token_buckets=(), row_buckets=())
    rows = empty_rows(one)
    columns = [value for name, value in vars(rows).items() if name not in TABLES]
    width = limits.max_model_len + limits.table_width
    return limits.max_rows * (
        sum(getattr(column, "nbytes", 0) for column in columns) + 2 * 4 * width
    )


def _position_bytes(spec: ModelSpec, limits: Limits) -> int:
    """Bytes of cosines and sines in float32, and of what they are computed from."""
    return 2 * sum(rope.dim for rope in spec.ropes) * 4 * limits.max_model_len


def empty_engine(
    spec: ModelSpec, limits: Limits, dtype: torch.dtype, device: Device, options: Options
) -> tuple[KV, EngineState]:
    """The cache and a state without requests. Raises ValueError if there is no memory for them, or
    no number."""
    check_memory(spec, limits, dtype, device, with_weights=False)
    try:
        kv = empty_kv(spec, limits, dtype, device)
        return kv, empty(limits, policy_of(options), options.seed)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ValueError(
            f"{limits.max_rows} rows of up to {limits.max_model_len} tokens and a cache of "
            f"{limits.n_blocks} blocks don't fit into memory ({error}); {ADVICE}"
        ) from error


def gib(n_bytes: int) -> str:
    """An amount of memory, as people say it."""
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**28 else f"{n_bytes / 2**20:.0f} MiB"
