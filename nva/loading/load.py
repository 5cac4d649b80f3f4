"""From a model's name to an Engine that can serve: its folder found, weights and tokenizer read,
the cache sized.

The law: what was asked is what is loaded; a name, option or checkpoint that can't be had is an
error that says why, and what was decided is said once. Read next: models/checkpoint.py for the
weights, sizes.py for the memory, forward.py for what computes."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

from nva.engine import Engine
from nva.forward import make_forward
from nva.host.cores import cpu_quota
from nva.host.messages import say
from nva.kernels import Change, Device, Kernels, backend, reference, with_kernels
from nva.loading.check import self_check
from nva.loading.defaults import read_defaults
from nva.loading.find import check_files, find_model, name_of
from nva.loading.options import LoadOptions, Options
from nva.loading.sizes import (
    block_bytes,
    check_memory,
    default_n_blocks,
    empty_engine,
    gib,
    limits_of,
    weights_bytes,
)
from nva.loading.warm_up import run_largest, warm_up
from nva.loop import Steps
from nva.models.checkpoint import (
    Checkpoint,
    load_params,
    open_checkpoint,
    read_json,
    resolve_dtype,
)
from nva.models.params import Params
from nva.state.checks import takes_fields_of
from nva.state.limits import Limits
from nva.steps.filters import filter_gaps
from nva.steps.sample import sample
from nva.text.chat import Tokenizer
from nva.text.detokenize import detokenizer
from nva.text.images import ImageReader, largest_image
from nva.text.prompts import load_tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack


@takes_fields_of(Options)
def load(
    model: str | os.PathLike[str] | None = None,
    *,
    kernels: Kernels | Change | None = None,
    steps: Steps | None = None,
    **options: Unpack[LoadOptions],
) -> Engine:
    """Load a model: a local folder, or a hub id such as "Qwen/Qwen3-0.6B", perhaps with "@" and a
    revision. Options are those of `Options`.

    Without a name, the folder in the NVA_MODEL environment variable, else the demo model.
    `kernels` are yours in place of the device's, or a function that makes them of the device's:
    `kernels=lambda own: attrs.evolve(own, rotary=mine)`; they are compared with the reference
    first, unless they say that they are approximate. `steps` are yours in place of nva's own:
    `steps=nva.Steps(schedule=mine)`.

    What was decided is told in one line by the logger "nva", on stderr where logging is not
    configured. Raises ValueError for an unknown option, for a device that isn't here, for sizes
    that memory can't hold, and for a model that can't be found or read; DeviceError where the
    device, or your kernels, compute something else than the reference."""
    chosen = Options(**options)
    if not isinstance(steps, (Steps, type(None))):
        raise ValueError(f"steps is {steps!r:.80}; give nva.Steps(schedule=..., sample=..., ...)")
    folder = find_model(model)
    with _readable(folder):
        # 1. What costs little is read first, so that what can't be had is refused at once.
        check_files(folder)
        checkpoint = open_checkpoint(folder)
        defaults = read_defaults(checkpoint.generation_config)
        device = _device(chosen, checkpoint, kernels)
        dtype = _dtype(chosen, checkpoint, device)
        limits = limits_of(checkpoint.spec, chosen, device, dtype)
        check_memory(checkpoint.spec, limits, dtype, device, with_weights=True)
        tokenizer = _tokenizer(folder)
        reader = _reader(checkpoint)

        # 2. The weights, once the device is known to compute what the reference does.
        self_check(checkpoint.spec, device, dtype)
        params = load_params(checkpoint, dtype, device.where, device.kernels)

    # 3. The cache takes its share of the memory that is left.
    if chosen.n_blocks is None and chosen.cache_memory is None:
        n_blocks = _n_blocks(checkpoint, limits, device, dtype, params, reader)
        limits = attrs.evolve(limits, n_blocks=n_blocks)
    engine = assemble(
        checkpoint,
        params,
        limits,
        device,
        dtype,
        options=chosen,
        tokenizer=tokenizer,
        reader=reader,
        defaults=defaults,
        steps=steps,
    )
    say(_decided(checkpoint, limits, device, dtype, kernels is not None))
    return engine


def assemble(
    checkpoint: Checkpoint,
    params: Params,
    limits: Limits,
    device: Device,
    dtype: torch.dtype,
    *,
    options: Options | None = None,
    tokenizer: Tokenizer | None = None,
    reader: ImageReader | None = None,
    defaults: Mapping[str, Any] | None = None,
    steps: Steps | None = None,
) -> Engine:
    """An Engine of parts that are there: a cache of limits.n_blocks is made, and every shape that
    the device compiles is compiled. Raises ValueError if memory can't hold the cache."""
    options = options or Options()
    spec = checkpoint.spec
    forward = make_forward(spec, limits, device, options.enforce_eager)
    kv, state = empty_engine(spec, limits, dtype, device, options)
    kv = warm_up(forward, params, kv, limits)
    eos_ids = checkpoint.eos_ids | _eos_ids(tokenizer)
    return Engine(
        name=name_of(checkpoint.folder),
        checkpoint=checkpoint,
        params=params,
        forward=forward,
        steps=_on_device(steps or Steps(), device),
        kv=kv,
        state=state,
        tokenizer=tokenizer,
        reader=reader,
        detokenizer=detokenizer(tokenizer),
        eos_ids=frozenset(id_ for id_ in eos_ids if id_ < spec.vocab_size),
        defaults=defaults or {},
    )


def _on_device(steps: Steps, device: Device) -> Steps:
    """The steps, nva's own sampler with the device's filter. A sampler of one's own is as it is."""
    if steps.sample is not sample:
        return steps
    filter_ = device.make_filter_gaps(filter_gaps)
    return attrs.evolve(steps, sample=functools.partial(sample, filter_=filter_))


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Within it, a file that can't be read is the model's fault, and said so."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"the model in {folder} can't be read ({error})") from error


def _device(options: Options, checkpoint: Checkpoint, kernels: Kernels | Change | None) -> Device:
    graph = "eager" if options.enforce_eager else options.graph
    device = backend(options.device, checkpoint.spec, graph)
    return device if kernels is None else with_kernels(device, kernels)


def _dtype(options: Options, checkpoint: Checkpoint, device: Device) -> torch.dtype:
    dtype = resolve_dtype(options.dtype, checkpoint)
    if dtype not in device.dtypes:
        names = [str(known).removeprefix("torch.") for known in device.dtypes]
        raise ValueError(
            f"dtype is {options.dtype}, here {dtype}, which device {device.name} can't compute "
            f"with; give {' or '.join(names)}"
        )
    return dtype


def _tokenizer(folder: Path) -> Tokenizer | None:
    try:
        return load_tokenizer(folder)
    except ValueError:
        if (folder / "tokenizer.json").is_file():
            read_json(folder / "tokenizer.json")  # names the file, if that is what is wrong
        raise


def _reader(checkpoint: Checkpoint) -> ImageReader | None:
    """What reads images, for a model that sees."""
    spec = checkpoint.spec.vision
    return ImageReader(folder=checkpoint.folder, spec=spec) if spec else None


def _n_blocks(
    checkpoint: Checkpoint,
    limits: Limits,
    device: Device,
    dtype: torch.dtype,
    params: Params,
    reader: ImageReader | None,
) -> int:
    """Blocks of the cache, where nobody says how many. A device that has its memory to itself runs
    the largest step first, so that what a step needs is not given to the cache."""
    spec = checkpoint.spec
    if device.measured_with:
        largest = largest_image(reader, limits.max_model_len) if reader else None
        run_largest(spec, limits, device, params, dtype, largest)
    return default_n_blocks(spec, limits, dtype, device)


def _eos_ids(tokenizer: Tokenizer | None) -> frozenset[int]:
    found = getattr(tokenizer, "eos_token_id", None)
    return frozenset() if found is None else frozenset({found})


def _decided(
    checkpoint: Checkpoint, limits: Limits, device: Device, dtype: torch.dtype, has_own: bool
) -> str:
    """What serves, in one line."""
    spec = checkpoint.spec
    if has_own:
        parts = ["your kernels"]
    elif device.kernels is reference.KERNELS:
        parts = ["plain torch"]
    else:
        parts = ["compiled kernels" if device.is_host else f"kernels of {device.name}"]
    if device.is_host:
        n_threads = min(torch.get_num_threads(), cpu_quota() or torch.get_num_threads())
        parts += [
            torch.backends.cpu.get_cpu_capability(),
            f"{n_threads} thread{'s' if n_threads > 1 else ''}",
        ]
    cache = limits.n_blocks * block_bytes(spec, limits.block_size, dtype, device)
    return (
        f"{name_of(checkpoint.folder)} on {device.where} ({', '.join(parts)}), weights of "
        f"{gib(weights_bytes(spec, dtype))} in {str(dtype).removeprefix('torch.')}, KV cache of "
        f"up to {gib(cache)} ({limits.n_blocks} blocks of {limits.block_size} tokens), "
        f"{limits.max_rows} rows of up to {limits.max_model_len} tokens"
    )
