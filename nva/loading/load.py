"""From a model's name to an Engine that can serve: its folder found, weights and tokenizer read,
the cache sized.

The law: what was asked is what is loaded; a name, option or checkpoint that can't be had is an
error that says why. Read next: models/checkpoint.py for the weights, forward.py for what computes
with them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import torch

from nva.forward import make_forward
from nva.kernels import Change, Device, Kernels, backend, with_kernels
from nva.loading.check import self_check
from nva.loading.warm_up import run_largest, warm_up
from nva.models.checkpoint import Checkpoint, load_params, open_checkpoint, resolve_dtype
from nva.state.checks import takes_fields_of
from nva.steps.sample import filter_gaps
from nva.text.chat import Tokenizer
from nva.text.detokenize import detokenizer
from nva.text.images import ImageReader, largest_image
from nva.text.prompts import load_tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack
import functools

from nva.engine import Engine
from nva.loading.defaults import read_defaults
from nva.loading.find import find_model
from nva.loading.options import LoadOptions, Options
from nva.loading.sizes import empty_engine, limits_of, n_blocks_of
from nva.loop import Steps
from nva.steps.sample import sample


@takes_fields_of(Options)
def load(
    model: str | Path | None = None,
    *,
    kernels: Kernels | Change | None = None,
    **options: Unpack[LoadOptions],
) -> Engine:
    """Load a model: a local folder, or a hub id such as "Qwen/Qwen3-0.6B". Options are those of
    `Options`.

    Without a name, the folder in the NVA_MODEL environment variable, else the demo model.
    `kernels` are yours in place of the device's, or a function that makes them of the device's:
    `kernels=lambda own: attrs.evolve(own, rotary=mine)`; they are compared with the reference
    first, unless they say that they are approximate.

    Raises ValueError for an unknown option, for a device that isn't here, for sizes that memory
    can't hold, and for a model that can't be found or read; DeviceError where the device, or your
    kernels, compute something else than the reference."""
    chosen = Options(**options)
    folder = find_model(model)
    checkpoint = open_checkpoint(folder)
    defaults = read_defaults(checkpoint.generation_config)
    spec = checkpoint.spec
    device = backend(chosen.device, spec, "eager" if chosen.enforce_eager else chosen.graph)
    if kernels is not None:
        device = with_kernels(device, kernels)
    dtype = _dtype(chosen, checkpoint, device)
    self_check(spec, device, dtype)
    params = load_params(checkpoint, dtype, device.where, device.kernels)
    limits = limits_of(spec, chosen, device)
    reader = ImageReader(folder=folder, spec=spec.vision) if spec.vision else None
    if chosen.n_blocks is None:
        if device.measured_with:
            largest = largest_image(reader, limits.max_model_len) if reader else None
            run_largest(spec, limits, device, params, dtype, largest)
        memory = chosen.cache_memory or device.cache_memory(device.where)
        n_blocks = n_blocks_of(spec, chosen, limits, dtype, device, memory)
        limits = attrs.evolve(limits, n_blocks=n_blocks)
    forward = make_forward(spec, limits, device, chosen.enforce_eager)
    kv, state = empty_engine(spec, limits, dtype, device, chosen)
    kv = warm_up(forward, params, kv, limits)
    tokenizer = load_tokenizer(folder)
    return Engine(
        name=folder.name,
        checkpoint=checkpoint,
        params=params,
        forward=forward,
        steps=Steps(sample=functools.partial(sample, filter_=device.make_filter_gaps(filter_gaps))),
        kv=kv,
        state=state,
        tokenizer=tokenizer,
        reader=reader,
        detokenizer=detokenizer(tokenizer),
        eos_ids=frozenset(
            id_ for id_ in checkpoint.eos_ids | _eos_ids(tokenizer) if id_ < spec.vocab_size
        ),
        defaults=defaults,
    )


def _dtype(options: Options, checkpoint: Checkpoint, device: Device) -> torch.dtype:
    dtype = resolve_dtype(options.dtype, checkpoint)
    if dtype not in device.dtypes:
        names = [str(known).removeprefix("torch.") for known in device.dtypes]
        raise ValueError(
            f"dtype is {options.dtype}, here {dtype}, which device {device.name} can't compute "
            "with; "
            f"give {' or '.join(names)}"
        )
    return dtype


def _eos_ids(tokenizer: Tokenizer | None) -> frozenset[int]:
    found = getattr(tokenizer, "eos_token_id", None)
    return frozenset() if found is None else frozenset({found})
