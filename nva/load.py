"""From a model's name to an Engine that can serve: its folder found, weights and tokenizer read, the cache sized.

The law: what was asked is what is loaded; a name, option or checkpoint that can't be had is an error that says why.
Read next: models/checkpoint.py for the weights, forward.py for what computes with them.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import attrs
import torch
from attrs.validators import optional

from nva.answers import Answers
from nva.forward import KV, Forward, empty_kv, make_forward
from nva.images import ImageReader, largest_image
from nva.kernels import GRAPHS, Kernels, backend, place
from nva.models.checkpoint import Checkpoint, load_params, open_checkpoint, resolve_dtype
from nva.models.params import Params
from nva.models.spec import ModelSpec
from nva.start import run_largest, self_check, warm_up
from nva.state.checks import LARGEST_INT32, flag, knows_names, takes_fields_of, whole
from nva.state.config import Limits, blocks_for
from nva.state.engine import EngineState, empty
from nva.state.policy import POLICIES, Policy
from nva.steps.sample import Filter, filter_gaps
from nva.text import Detokenizer, Tokenizer, detokenizer, load_tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEMO_MODEL = "SmolLM2-135M-Instruct"
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
        raise ValueError(f"policy is {value!r}; choose one of {', '.join(POLICIES)}, or give a nva.Policy")
    return POLICIES[value]


def _bytes(value: int | str | None) -> int | None:
    """A number of bytes, as itself or as "4GiB"."""
    if not isinstance(value, str):
        return value
    number, unit = next(((value.removesuffix(unit), n) for unit, n in _UNITS.items() if value.endswith(unit)), ("", 0))
    try:
        return int(float(number) * unit)
    except (ValueError, OverflowError):
        raise ValueError(f'memory is {value!r}; give bytes, or a number with a unit, such as "4GiB"') from None


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

    dtype: float32, bfloat16, float16, or auto for the checkpoint's own. device: cpu, cuda, npu, npu:1, ..., or auto for
    the best one here. block_size: tokens a block of the cache holds. n_blocks, or cache_memory (bytes, or "4GiB"): size
    of the cache; by default what max_rows of full length need, up to a third of the memory that is free.
    max_batched_tokens: tokens a step computes at most. max_rows: sequences that run at once. max_model_len: tokens of
    prompt and answer together, by default the model's own. prefix_caching: keep and find the blocks of common prefixes.
    enforce_eager: never compile. graph: how an NPU runs the forward: auto, eager, ge or aclgraph (docs/npu.md). policy:
    fcfs, priority, shortest, or a Policy. seed: of the requests that bring none.
    """

    dtype: str = "auto"
    device: str = attrs.field(default="auto", converter=str)
    block_size: int | None = attrs.field(default=None, validator=optional(_SIZE))
    n_blocks: int | None = attrs.field(default=None, validator=optional(_SIZE))
    cache_memory: int | None = attrs.field(default=None, converter=_bytes, validator=optional(whole(1)))
    max_batched_tokens: int = attrs.field(default=2048, validator=_SIZE)
    max_rows: int = attrs.field(default=256, validator=_SIZE)
    max_model_len: int | None = attrs.field(default=None, validator=optional(whole(2, LARGEST_INT32)))
    prefix_caching: bool = attrs.field(default=True, validator=flag)
    enforce_eager: bool = attrs.field(default=False, validator=flag)
    graph: str = attrs.field(default="auto", validator=_graph)
    policy: Policy = attrs.field(default="fcfs", converter=_policy)
    seed: int = attrs.field(default=0, validator=whole(0))

    def __attrs_post_init__(self) -> None:
        if self.n_blocks is not None and self.cache_memory is not None:
            raise ValueError("n_blocks and cache_memory both size the cache; give one of them")
        if self.enforce_eager and self.graph not in ("auto", "eager"):
            raise ValueError(f"enforce_eager never compiles, but graph is {self.graph!r}; give one of them")


@attrs.define(kw_only=True, eq=False, repr=False)
class Engine:
    """A loaded model and what it is serving. The only mutable thing of nva; its steps are in run.py."""

    name: str
    checkpoint: Checkpoint
    params: Params
    forward: Forward
    filter: Filter  # of the sampler
    kv: KV
    state: EngineState
    tokenizer: Tokenizer | None
    reader: ImageReader | None  # of images, for a model that sees
    detokenizer: Detokenizer  # that has seen nothing
    eos_ids: frozenset[int]  # union of config, generation_config and tokenizer
    defaults: Mapping[str, Any]  # of SamplingParams, from generation_config
    n_requests: int = 0
    answers: Answers = attrs.field(factory=Answers)  # to the requests in flight
    lock: Any = attrs.field(factory=threading.RLock, init=False)  # held by whoever reads or replaces the fields here
    stepping: Any = attrs.field(factory=threading.Lock, init=False)  # held within a step
    closed: list[Collection[int | str]] = attrs.field(factory=list, init=False)  # ids of streams, to be aborted

    def __repr__(self) -> str:
        rows, blocks = self.state.rows, self.state.blocks
        return (
            f"Engine({self.name}: {int(rows.is_running.sum())} rows running, {len(self.state.waiting)} waiting, "
            f"{blocks.n_free} of {self.state.limits.n_blocks} blocks free)"
        )


@takes_fields_of(Options)
def load(model: str | Path | None = None, **options: Unpack[LoadOptions]) -> Engine:
    """Load a model: a local folder, or a hub id such as "Qwen/Qwen3-0.6B". Options are those of `Options`.

    Without a name, the folder in the NVA_MODEL environment variable, else the demo model. Raises ValueError for an
    unknown option, for a device that isn't here, for sizes that memory can't hold, and for a model that can't be found
    or read.
    """
    chosen = Options(**options)
    folder = find_model(model)
    checkpoint = open_checkpoint(folder)
    spec, where = checkpoint.spec, _device(chosen.device)
    kernels = backend(where, spec, "eager" if chosen.enforce_eager else chosen.graph)
    device, dtype = place(where), _dtype(chosen, checkpoint, kernels)
    self_check(spec, kernels, dtype, device)
    params = load_params(checkpoint, dtype, device, kernels)
    limits = _limits(spec, chosen, kernels)
    reader = ImageReader(folder=folder, spec=spec.vision) if spec.vision else None
    if chosen.n_blocks is None:
        if where.startswith("npu"):
            largest = largest_image(reader, limits.max_model_len) if reader else None
            run_largest(spec, limits, backend(where, spec, "eager"), params, dtype, device, largest)
        memory = chosen.cache_memory or kernels.cache_memory(device)
        limits = attrs.evolve(limits, n_blocks=_n_blocks(spec, chosen, limits, dtype, memory))
    forward = make_forward(spec, limits, kernels, device, chosen.enforce_eager)
    kv, state = _empty(spec, limits, dtype, device, chosen)
    kv = warm_up(forward, params, kv, limits)
    tokenizer = load_tokenizer(folder)
    return Engine(
        name=folder.name,
        checkpoint=checkpoint,
        params=params,
        forward=forward,
        filter=kernels.make_filter_gaps(filter_gaps),
        kv=kv,
        state=state,
        tokenizer=tokenizer,
        reader=reader,
        detokenizer=detokenizer(tokenizer),
        eos_ids=frozenset(id_ for id_ in checkpoint.eos_ids | _eos_ids(tokenizer) if id_ < spec.vocab_size),
        defaults=_defaults(checkpoint.generation_config),
    )


def find_model(model: str | Path | None) -> Path:
    """The model's folder, downloaded from the hub if need be. Raises ValueError if it can't be had."""
    if model is None:
        model = os.environ.get("NVA_MODEL")
    if model is None:
        model = demo_folder()
        if not model.is_dir():
            raise ValueError(f"no model named, and the demo model is not in {model}; name one, or run `make demo`")
        print(f"nva: no model named, using the demo model {model.name}", file=sys.stderr)
    if not isinstance(model, (str, os.PathLike)):
        raise ValueError(f"model is {model!r}; give a checkpoint's folder or a hub id such as Qwen/Qwen3-0.6B")
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or str(model).count("/") > 1 or str(model).startswith("."):
        raise ValueError(f"there is no folder {model}; give a checkpoint's folder or a hub id such as Qwen/Qwen3-0.6B")
    return _download(str(model))


def demo_folder() -> Path:
    """Where scripts/demo_model.py puts the demo model."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "nva" / DEMO_MODEL


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(model, allow_patterns=wanted))
    except HFValidationError as error:
        raise ValueError(f"{model!r} is neither a folder nor a hub id: {error}") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"there is no folder {model}, and the hub can't give a model of that name ({error}); "
            "check the name and the connection, or download it elsewhere and give its folder"
        ) from error


def _device(name: str) -> str:
    if name == "auto":
        has_npu = hasattr(torch, "npu") and torch.npu.is_available()  # torch_npu, where installed, is imported by torch
        return "npu" if has_npu else "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|(cuda|npu)(:[0-9]+)?", name):
        raise ValueError(f"device is {name!r}; give cpu, cuda, npu, cuda:1, npu:1, ..., or auto for the best one here")
    kind, _, index = name.partition(":")
    n_gpus = torch.cuda.device_count() if kind == "cuda" and torch.cuda.is_available() else 0
    if kind == "cuda" and not int(index or 0) < n_gpus:
        raise ValueError(
            f"device is {name!r}, but torch {torch.__version__} finds {n_gpus} GPUs here; give another, or cpu"
        )
    return name


def _dtype(options: Options, checkpoint: Checkpoint, kernels: Kernels) -> torch.dtype:
    dtype = resolve_dtype(options.dtype, checkpoint.config)
    if dtype not in kernels.dtypes:
        names = [str(known).removeprefix("torch.") for known in kernels.dtypes]
        raise ValueError(
            f"dtype is {options.dtype}, here {dtype}, which device {options.device} can't compute with; "
            f"give {' or '.join(names)}"
        )
    return dtype


def _limits(spec: ModelSpec, options: Options, kernels: Kernels) -> Limits:
    """The limits, the number of blocks being 1 if it is still to be found."""
    max_model_len = options.max_model_len or spec.max_position
    if max_model_len > spec.reach:
        raise ValueError(
            f"max_model_len is {max_model_len}; the model's positions reach {spec.reach}; set rope scaling in its "
            "config.json to go further"
        )
    max_batched_tokens = min(options.max_batched_tokens, options.max_rows * max_model_len)
    token_buckets, row_buckets = kernels.buckets(max_batched_tokens, options.max_rows, max_model_len)
    return Limits(
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        n_blocks=options.n_blocks or 1,
        block_size=options.block_size or kernels.block_size,
        max_rows=options.max_rows,
        max_batched_tokens=max_batched_tokens,
        position_axes=3 if spec.rope_axes else 1,
        prefix_caching=options.prefix_caching,
        token_buckets=token_buckets,
        row_buckets=row_buckets,
    )


def _empty(
    spec: ModelSpec, limits: Limits, dtype: torch.dtype, device: torch.device, options: Options
) -> tuple[KV, EngineState]:
    """The cache and a state without requests. Raises ValueError if there is no memory for them, or no number."""
    advice = "lower max_rows, max_model_len, or n_blocks and cache_memory"
    if (limits.n_scratch + limits.n_blocks) * limits.block_size > LARGEST_INT32:
        raise ValueError(
            f"the cache has {limits.n_blocks} blocks of {limits.block_size} tokens, more than slots can be numbered; "
            f"{advice}"
        )
    try:
        return empty_kv(spec, limits, dtype, device), empty(limits, options.policy, options.seed)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ValueError(
            f"{limits.max_rows} rows of up to {limits.max_model_len} tokens and a cache of {limits.n_blocks} blocks "
            f"don't fit into memory ({error}); {advice}"
        ) from error


def _n_blocks(spec: ModelSpec, options: Options, limits: Limits, dtype: torch.dtype, memory: int) -> int:
    """Blocks that so much memory holds, scratch blocks not counted: all if it was asked for, else those needed."""
    block_bytes = 2 * spec.n_layers * limits.block_size * spec.n_kv_heads * spec.head_dim * dtype.itemsize
    needed = options.max_rows * blocks_for(limits.max_model_len, limits.block_size)
    n_blocks = memory // block_bytes if options.cache_memory else min(needed, memory // block_bytes)
    if n_blocks < 1:
        raise ValueError(f"the cache's memory holds no block of {block_bytes} bytes; raise cache_memory")
    return n_blocks


def _eos_ids(tokenizer: Tokenizer | None) -> frozenset[int]:
    found = getattr(tokenizer, "eos_token_id", None)
    return frozenset() if found is None else frozenset({found})


def _defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint's generation_config.json says of SamplingParams. Greedy where it turns sampling off."""
    names = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
    found = {name: value for name, value in generation_config.items() if name in names and value is not None}
    if generation_config.get("max_new_tokens") is not None:
        found["max_tokens"] = generation_config["max_new_tokens"]
    if generation_config.get("do_sample") is False:
        found["temperature"] = 0.0
    return found
