"""A CUDA graph for a CPU: record a step's kernel calls once, replay them.

A tape is made for each shape of a small batch. Replaying it runs none of the Python code between
the kernels, which takes as long for one token as for a thousand.

The law: a tape computes what the function computes. What differs between two steps of one shape is
copied in; all else (addresses, sizes, the order of calls) is on the tape. Python code between the
calls, as a kernel of a user's own may have, is on no tape: so a tape is compared with the computed
step before it is used. Read next: operators.py, which calls its
kernels through `call`, and says what differs between steps."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from nva.host.messages import say
from nva.kernels import Compute
from nva.kernels.cpu.memory import aligned

MOST_TOKENS = 64
"""Tokens of a step for which a tape is made: with more, the kernels take far longer than the code
between them."""

MOST_TAPES = 64
"""Tapes that are kept, those that were used last: half a megabyte each for 30 layers."""

Calls = list[tuple[Callable[..., Any], tuple[Any, ...]]]
Steps = Callable[[Any], "tuple[np.ndarray, ...] | None"]
WithSteps = Callable[[Any, Sequence[np.ndarray]], Any]

_ALLOCATE = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
}


class _Recording(threading.local):
    calls: Calls | None = None


_recording = _Recording()


def call(function: Any, *arguments: Any) -> None:
    """Call a function of C; also write the call down, if a tape is being made."""
    function(*arguments)
    if _recording.calls is not None:
        kinds = zip(function.argtypes, arguments, strict=True)
        _recording.calls.append((function, tuple(_boxed(*pair) for pair in kinds)))


@functools.lru_cache(maxsize=1 << 12)
def _boxed(kind: Any, value: Any) -> Any:
    """An argument as C takes it. Tapes have most of theirs in common."""
    return kind(value)


def taped(compute: Compute, arrays_of: Steps, with_arrays: WithSteps) -> Compute:
    """`compute(params, caches, inputs)`, replayed where its shape came before.

    arrays_of(inputs) are the arrays that differ between steps, or None where no tape can be made;
    with_arrays(inputs, arrays) are the inputs with others in their place. Other parameters or
    caches begin anew. What a step writes, it may write twice: a shape's second step is recorded,
    its third is replayed and computed, and the two compared."""
    tapes: dict[Any, Tape | Seen] = {}
    constants: list[Any] = [None] * 3
    arena, is_taped = Arena(), True

    @functools.wraps(compute)
    def run(params: Any, caches: Any, inputs: Any) -> Tensor:
        nonlocal is_taped
        now = params, caches, inputs.rope_tables
        if any(old is not new for old, new in zip(constants, now, strict=True)):
            constants[:] = now
            tapes.clear()
        arrays = arrays_of(inputs) if is_taped and len(inputs.token_ids) <= MOST_TOKENS else None
        if arrays is None:
            return compute(params, caches, inputs)
        shape = tuple(array.shape for array in arrays)

        def again(arrays: Sequence[np.ndarray]) -> Tensor:
            return compute(params, caches, with_arrays(inputs, arrays))

        try:
            result, tapes[shape] = _advanced(tapes.pop(shape, None), arrays, again, arena)
        except NotOnTape as found:
            say(f"steps are computed call by call, since {found}", logging.WARNING)
            is_taped = False
            return compute(params, caches, inputs)
        if len(tapes) > MOST_TAPES:
            del tapes[next(iter(tapes))]
        return result

    return run


def _advanced(
    stage: Tape | Seen | None,
    arrays: Sequence[np.ndarray],
    again: Callable[..., Tensor],
    arena: Arena,
) -> tuple[Tensor, Tape | Seen]:
    """The result of a shape's next step, and its stage after that. again(arrays) computes the step.

    A shape that comes first is computed, since it may never come back; one that was seen is
    recorded; a tape that is not proven is compared; a proven one is replayed."""
    if stage is None:
        return again(arrays), Seen()
    if isinstance(stage, Seen):
        own = tuple(array.copy() for array in arrays)
        return record(lambda: again(own), own, arena)
    if not stage.is_proven:
        return prove(stage, arrays, lambda: again(arrays))
    return stage.replay(arrays), stage


@attrs.frozen
class Seen:
    """The stage of a shape that came once."""


class NotOnTape(Exception):
    """Why a function can't be replayed."""


@attrs.frozen(kw_only=True)
class Tape:
    """The arrays that a step reads, its calls, and what then gives the result."""

    arrays: tuple[np.ndarray, ...]
    calls: Calls
    result: Callable[[], Tensor]
    is_proven: bool = False

    def replay(self, arrays: Sequence[np.ndarray]) -> Tensor:
        """What the function gives for these arrays, in memory of its own."""
        for own, new in zip(self.arrays, arrays, strict=True):
            own[...] = new
        for function, arguments in self.calls:
            function(*arguments)
        return self.result()


def record(
    compute: Callable[[], Tensor], arrays: tuple[np.ndarray, ...], arena: Arena
) -> tuple[Tensor, Tape]:
    """Compute once; the result, and the tape of how it came about."""
    calls = _recording.calls = []
    try:
        with Recorder(calls, arena):
            result = compute()
    finally:
        _recording.calls = None
    return result.clone(), Tape(arrays=arrays, result=_last(calls, arena.lent(result)), calls=calls)


def prove(
    tape: Tape, arrays: Sequence[np.ndarray], compute: Callable[[], Tensor]
) -> tuple[Tensor, Tape]:
    """The result, and the tape as one that gives it. Raises NotOnTape if it gives another."""
    replayed = tape.replay(arrays)
    result = compute()
    if not torch.allclose(replayed, result, rtol=0, atol=0, equal_nan=True):
        raise NotOnTape("a kernel does more than call torch's operators and compiled functions")
    return result, attrs.evolve(tape, is_proven=True)


def _last(calls: Calls, place: Tensor) -> Callable[[], Tensor]:
    """What gives the result in memory of its own: the last call, taken off the tape, if it can;
    else a copy."""
    function, arguments = calls[-1]
    if function is not _again or arguments[1][-1].data_ptr() != place.data_ptr():
        return place.clone
    calls.pop()
    return arguments[0]


class Recorder(TorchDispatchMode):
    """Writes down torch's operators, and has every tensor made in the arena. Views need no call:
    memory stays put."""

    def __init__(self, calls: Calls, arena: Arena) -> None:
        super().__init__()
        self.calls, self.arena = calls, arena

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to skip it, torch would first import it, which takes a second amid the second
        step."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What the operator gives, moved into the arena if it is new."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in _ALLOCATE:
            return self.arena.empty_like(out)
        if func._schema.returns and not any(
            isinstance(leaf, Tensor) for leaf in _pytree.tree_leaves(out)
        ):
            raise NotOnTape(f"{func} tells Python what a tensor holds")
        again = functools.partial(func, *self._lent(args), **self._lent(kwargs))
        if func._schema.is_mutable:
            self.calls.append((again, ()))
            return out
        if _storages(out) & _storages((args, kwargs)):
            return out
        kept = _pytree.tree_map_only(Tensor, self.arena.copied, out)
        self.calls.append((_again, (again, self._lent(_pytree.tree_leaves(kept)))))
        return kept

    def _lent(self, tree: Any) -> Any:
        return _pytree.tree_map_only(Tensor, self.arena.lent, tree)


def _again(function: Callable[[], Any], places: list[Tensor]) -> None:
    """Compute again into the same places."""
    for place, result in zip(places, _pytree.tree_leaves(function()), strict=True):
        place.copy_(result)


def _storages(tree: Any) -> set[int]:
    return {
        leaf.untyped_storage().data_ptr()
        for leaf in _pytree.tree_leaves(tree)
        if isinstance(leaf, Tensor)
    }


class Arena:
    """Memory for what a step computes in between, shared by all tapes, of which one runs at a time.
    While a tape is made, what a tensor no longer needs is used again, as any allocator does; a tape
    fixes who was given what."""

    def __init__(self) -> None:
        self.free: defaultdict[int, list[np.ndarray]] = defaultdict(list)  # by size
        self.owned: dict[int, np.ndarray] = {}  # by address

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Memory for a contiguous tensor of this shape; free again when no tensor looks at it."""
        size = 1 << max(6, (tensor.nbytes - 1).bit_length())
        memory = self.free[size].pop() if self.free[size] else aligned(size)
        self.owned[memory.ctypes.data] = memory
        loan = memory[: tensor.nbytes]
        weakref.finalize(loan, self.free[size].append, memory)
        return torch.from_numpy(loan).view(tensor.dtype).view(tensor.shape)

    def copied(self, tensor: Tensor) -> Tensor:
        """The tensor in memory of the arena."""
        return self.empty_like(tensor).copy_(tensor)

    def lent(self, tensor: Tensor) -> Tensor:
        """The same view of the memory, for a tape: it doesn't keep the memory from being used
        again."""
        memory = self.owned.get(tensor.untyped_storage().data_ptr())
        if memory is None:
            return tensor
        whole = torch.from_numpy(memory).view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
