"""What the benchmarks share: workloads with fixed seeds, an engine to serve them, clocks, tables.

The law: a figure is measured by the loop of run.py with a clock around each part, and the machine's
own limits are measured beside it in the same minute, because they move. Read next: the files in
bench/, one for each question."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from nva.engine import Engine
from nva.forward import empty_kv, make_forward
from nva.kernels import backend
from nva.loading.load import load
from nva.loop import Steps, step
from nva.models.checkpoint import Checkpoint, resolve_dtype
from nva.models.params import layer_table, random_params
from nva.models.registry import read_model
from nva.state.engine import empty, is_busy
from nva.state.limits import Limits
from nva.state.request import SamplingParams, request
from nva.state.rows import Rows, running
from nva.steps.filters import filter_gaps
from nva.steps.sample import sample
from nva.steps.submit import submit
from nva.text.detokenize import TextStream, detokenizer, read, text_stream

PARTS = ("schedule", "pack", "forward", "sample", "commit", "detokenize")
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b-shape": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
    }
}
"""Models that are measured by their shape alone, with random weights."""
HOST_SHARE = 0.05  # of the time, that all but the forward may take


@attrs.frozen(kw_only=True)
class Workload:
    """Prompts of token ids, and how many tokens each is answered with."""

    prompts: list[list[int]]
    output_lens: list[int]


def random_workload(
    seed: int, n: int, prompt: tuple[int, int], output: tuple[int, int]
) -> Workload:
    """n prompts whose lengths are drawn from a range, as are those of the answers."""
    rng = random.Random(seed)
    prompts = [_ids(rng, rng.randint(*prompt)) for _ in range(n)]
    return Workload(prompts=prompts, output_lens=[rng.randint(*output) for _ in range(n)])


def shared_workload(seed: int, n: int, n_shared: int, n_own: int, output_len: int) -> Workload:
    """n prompts with the same first n_shared tokens and n_own of their own."""
    rng = random.Random(seed)
    prefix = _ids(rng, n_shared)
    return Workload(
        prompts=[prefix + _ids(rng, n_own) for _ in range(n)], output_lens=[output_len] * n
    )


def _ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(100, 40_000) for _ in range(n)]


def fitted(workload: Workload, vocab_size: int) -> Workload:
    """The workload in ids below a vocabulary's size; those that are stay as they are."""
    first = min(100, vocab_size // 2)
    prompts = [
        [id_ if id_ < vocab_size else first + id_ % (vocab_size - first) for id_ in p]
        for p in workload.prompts
    ]
    return attrs.evolve(workload, prompts=prompts)


def open_model(name: str | None, dtype: str = "bfloat16", **options: Any) -> Engine:
    """A checkpoint as load() finds it, or one of SHAPES with random weights."""
    if name not in SHAPES:
        return load(name, dtype=dtype, **options)
    spec, weights = read_model(SHAPES[name])
    checkpoint = Checkpoint(
        folder=Path(name), config=SHAPES[name], generation_config={}, spec=spec, weights=weights
    )
    device, kind = backend("cpu"), resolve_dtype(dtype, checkpoint)
    sizes = {"max_model_len": 2304, "n_blocks": 2304, **options}
    limits = Limits(vocab_size=spec.vocab_size, block_size=device.block_size, **sizes)
    return Engine(
        name=name,
        checkpoint=checkpoint,  # whose folder isn't there
        params=random_params(spec, kind, torch.Generator().manual_seed(0), device.kernels),
        forward=make_forward(spec, limits, device),
        kv=empty_kv(spec, limits, kind, device),
        state=empty(limits),
        tokenizer=None,
        reader=None,
        detokenizer=detokenizer(None),
        eos_ids=frozenset(),
        steps=Steps(sample=functools.partial(sample, filter_=device.make_filter_gaps(filter_gaps))),
        defaults={},
    )


@attrs.frozen(kw_only=True)
class Step:
    """One step: seconds of each part, what it computed, and how full the cache was, counted off the
    clock."""

    seconds: dict[str, float]
    n_tokens: int
    rows: Rows  # as planned
    block_size: int

    @property
    def slots_used(self) -> int:
        """KV slots that hold a token."""
        return int(self.rows.n_computed[running(self.rows)].sum())

    @property
    def slots_taken(self) -> int:
        """Slots of the blocks that rows hold, a shared block counted for each."""
        return int(self.rows.n_blocks[running(self.rows)].sum()) * self.block_size


@attrs.frozen(kw_only=True)
class Report:
    """A workload served: its steps, and the seconds from the start to each request's first and last
    token."""

    workload: Workload
    steps: list[Step]
    seconds: float
    first: list[float]
    last: list[float]

    @property
    def n_output(self) -> int:
        return sum(self.workload.output_lens)

    @property
    def n_total(self) -> int:
        return self.n_output + sum(map(len, self.workload.prompts))

    @property
    def shares(self) -> dict[str, float]:
        """Share of the time that each part took."""
        return {
            part: sum(step.seconds[part] for step in self.steps) / self.seconds for part in PARTS
        }

    @property
    def host_share(self) -> float:
        """Share of the time that was not spent in the forward."""
        return 1 - self.shares["forward"]


def serve(engine: Engine, workload: Workload) -> Report:
    """Serve a workload from an empty cache, all requests at once, greedy and past any end of
    sequence.

    Ids that the model's vocabulary doesn't have are replaced by others.
    """
    workload = fitted(workload, engine.state.limits.vocab_size)
    asked = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in workload.output_lens
    ]
    requests = [
        request(i, ids, params)
        for i, (ids, params) in enumerate(zip(workload.prompts, asked, strict=True))
    ]
    engine.state = submit(
        empty(engine.state.limits, engine.state.policy, engine.state.seed), requests
    )
    streams = [text_stream(engine.detokenizer) for _ in requests]
    steps, times, start = list[Step](), [list[float]() for _ in requests], time.perf_counter()
    while is_busy(engine.state):
        timed, answered = _step(engine, streams)
        steps.append(timed)
        for i in answered:
            times[i].append(time.perf_counter() - start)
    seconds, first, last = (
        time.perf_counter() - start,
        [each[0] for each in times],
        [each[-1] for each in times],
    )
    return Report(workload=workload, steps=steps, seconds=seconds, first=first, last=last)


def _step(engine: Engine, streams: list[TextStream]) -> tuple[Step, list[int]]:
    """A step and its text, with a clock; also which requests got a token."""
    marks = [time.perf_counter()]
    seen: dict[str, Any] = {}

    def observe(part: str, result: Any) -> Any:
        marks.append(time.perf_counter())
        seen[part] = result
        return result

    engine.state, engine.kv, output = step(
        engine.steps, engine.forward, engine.params, engine.state, engine.kv, observe
    )
    state, plan = seen["schedule"]
    answered = [int(found.id) for found in output.requests]
    for i, token in zip(answered, output.tokens.tolist(), strict=True):
        streams[i], _ = read(streams[i], [token])
    observe("detokenize", None)
    seconds = dict(
        zip(PARTS, (after - before for before, after in itertools.pairwise(marks)), strict=True)
    )
    return Step(
        seconds=seconds, n_tokens=plan.n_tokens, rows=state.rows, block_size=state.limits.block_size
    ), answered


def best(function: Callable[[], Any], n: int = 5) -> float:
    """The least seconds of n calls, after one that is not counted."""
    function()
    times = []
    for _ in range(n):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def bandwidth() -> float:
    """Bytes per second of a plain read of 512 MiB."""
    numbers = torch.ones(1 << 27)
    return 4 * len(numbers) / best(lambda: numbers.sum(), 3)


def matmul_limit(dtype: torch.dtype = torch.bfloat16, n: int = 1024) -> float:
    """Operations per second of torch's own product of square matrices."""
    a, b = torch.ones(n, n, dtype=dtype), torch.ones(n, n, dtype=dtype)
    return 2 * n**3 / best(lambda: a @ b)


def _used(engine: Engine) -> Iterator[tuple[Any, float]]:
    """Each weight of the layers, and what share of it one token is multiplied with: of experts only
    the active ones."""
    spec = engine.checkpoint.spec
    for i, layer in enumerate(engine.params["layers"]):
        table, experts = layer_table(spec, i), spec.experts[i]
        for name, weight in layer.items():
            is_shared_out = experts is not None and table[name].kind == "experts"
            yield weight, experts.n_active / experts.n_experts if is_shared_out else 1.0


def weight_bytes(engine: Engine) -> float:
    """Bytes of weights that decoding one token reads: the layers, of their experts the active ones,
    and the head.

    Of the embedding it reads one row, which isn't counted. Rows that decode together share all but
    their experts."""
    parts = [*_used(engine), (engine.params["norm"], 1.0), (engine.params["head"], 1.0)]
    return sum(share * stored_bytes(weight) for weight, share in parts)


def stored_bytes(params: Any) -> int:
    """Bytes of memory that parameters take."""
    found = torch.utils._pytree.tree_leaves(params)
    return sum(leaf.nbytes for leaf in found if isinstance(leaf, torch.Tensor))


def kv_bytes(engine: Engine) -> int:
    """Bytes of keys and values of one token, in all layers: a decode step reads them for each token
    of a row."""
    return sum(tensor[0, 0].nbytes for layer in engine.kv.layers for tensor in layer)


def prefill_operations(engine: Engine, n: int) -> float:
    """Operations that a prompt of n tokens takes: products with the weights, of experts with each
    token's active ones, and causal attention in every layer."""
    layers = engine.params["layers"]
    weights = sum(share * math.prod(weight.shape) for weight, share in _used(engine))
    attention = sum(4 * layer["o"].shape[1] * n * (n + 1) / 2 for layer in layers)
    return 2 * n * weights + attention + 2 * math.prod(engine.params["head"].shape)


def goal(value: float, at_least: float | None = None, at_most: float | None = None) -> str:
    """How a figure stands to what is wanted of it, such as ">= 1.5: missed by 12 %"."""
    if at_least is None and at_most is None:
        return "none"
    sign, wanted, gap = (">=", at_least, -1) if at_most is None else ("<=", at_most, 1)
    missed = gap * (value / wanted - 1)
    return f"{sign} {_text(float(wanted))}: " + (
        "met" if missed <= 0 else f"missed by {_text(100 * missed)} %"
    )


def throughput(engine: Engine, workload: Workload) -> dict[str, Any]:
    """Serve a workload; tokens per second, and the share of the time that the host took."""
    report = serve(engine, workload)
    return {
        "model": engine.name,
        "requests": len(workload.prompts),
        "seconds": report.seconds,
        "output tokens/s": report.n_output / report.seconds,
        "total tokens/s": report.n_total / report.seconds,
        "host share": report.host_share,
        "goal": goal(report.host_share, at_most=HOST_SHARE),
    }


def latency(engine: Engine, workload: Workload) -> dict[str, Any]:
    """Serve one request twice and tell of the second: the time to its first token, and that of each
    after it."""
    serve(engine, workload)
    limit, report = bandwidth(), serve(engine, workload)
    per_token = (report.last[0] - report.first[0]) / max(1, report.n_output - 1)
    length = len(workload.prompts[0]) + report.n_output / 2  # that a token reads, on average
    return {
        "model": engine.name,
        "first token ms": report.first[0] * 1e3,
        "ms per token": per_token * 1e3,
        "tokens/s": 1 / per_token,
        "bandwidth GB/s": limit / 1e9,
        "share of it": (weight_bytes(engine) + length * kv_bytes(engine)) / per_token / limit,
        "host share": report.host_share,
    }


def quick(model: str | None, dtype: str, n: int) -> None:
    """What `nva bench` prints: n requests together, then one alone. bench/ asks more, with more
    options."""
    engine = open_model(model, dtype, max_rows=n, max_model_len=1024)
    show(
        "many requests together",
        [throughput(engine, random_workload(0, n, (100, 512), (100, 256)))],
    )
    show("one request alone", [latency(engine, random_workload(1, 1, (64, 64), (128, 128)))])


def show(title: str, rows: Sequence[Mapping[str, Any]], path: str | None = None) -> None:
    """Print rows as a table, and write them to a JSON file if one is named."""
    names = list(rows[0])
    cells = [[_text(row[name]) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    print(title)
    for line in (names, *cells):
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
    if path:
        Path(path).write_text(json.dumps({"title": title, "rows": list(rows)}, indent=2))


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
