"""What the benchmarks share: workloads with fixed seeds, an engine to serve them, clocks, tables.

The law: a figure is measured by the engine's one step, observed by a clock, and the machine's own
limits are measured beside it in the same minute, because they move. Read next: loop.py for the
step; the files in bench/, one for each question."""

from __future__ import annotations

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
from nva.kernels import backend
from nva.loading.load import assemble, load
from nva.loop import step
from nva.models.checkpoint import Checkpoint, resolve_dtype
from nva.models.params import layer_table, random_params
from nva.models.registry import read_model
from nva.state.engine import empty, is_busy
from nva.state.events import Arrive
from nva.state.limits import Limits
from nva.state.request import Request, SamplingParams, request
from nva.state.rows import Rows, running
from nva.steps.apply import apply
from nva.text.detokenize import TextStream, read, text_stream

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
    prompts = [_fitted(prompt, first, vocab_size) for prompt in workload.prompts]
    return attrs.evolve(workload, prompts=prompts)


def _fitted(ids: list[int], first: int, vocab_size: int) -> list[int]:
    """The ids, those beyond the vocabulary replaced by others of [first, vocab_size)."""
    n = vocab_size - first
    return [id_ if id_ < vocab_size else first + id_ % n for id_ in ids]


def open_model(name: str | None, dtype: str = "bfloat16", **options: Any) -> Engine:
    """A checkpoint as load() finds it, or one of SHAPES with random weights."""
    if name not in SHAPES:
        return load(name, dtype=dtype, **options)
    spec, weights = read_model(SHAPES[name])
    checkpoint = Checkpoint(
        folder=Path(name),  # which isn't there
        config=SHAPES[name],
        generation_config={},
        spec=spec,
        weights=weights,
    )
    device = backend("cpu")
    kind = resolve_dtype(dtype, checkpoint)
    params = random_params(spec, kind, torch.Generator().manual_seed(0), device.kernels)
    sizes = {"max_model_len": 2304, "n_blocks": 2304, **options}
    limits = Limits(vocab_size=spec.vocab_size, block_size=device.block_size, **sizes)
    return assemble(checkpoint, params, limits, device, kind)


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
        """Tokens of the answers."""
        return sum(self.workload.output_lens)

    @property
    def n_total(self) -> int:
        """Tokens of prompts and answers."""
        return self.n_output + sum(map(len, self.workload.prompts))

    @property
    def shares(self) -> dict[str, float]:
        """Share of the time that each part took."""
        seconds = {part: sum(step.seconds[part] for step in self.steps) for part in PARTS}
        return {part: each / self.seconds for part, each in seconds.items()}

    @property
    def host_share(self) -> float:
        """Share of the time that was not spent in the forward."""
        return 1 - self.shares["forward"]


def serve(engine: Engine, workload: Workload) -> Report:
    """Serve a workload from an empty cache, all requests at once, greedy and past any end of
    sequence.

    Ids that the model's vocabulary doesn't have are replaced by others.
    """
    # 1. All requests arrive at a state that has forgotten what it served.
    before = engine.state
    workload = fitted(workload, before.limits.vocab_size)
    requests: list[Request] = []
    for prompt, n in zip(workload.prompts, workload.output_lens, strict=True):
        params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
        requests.append(request(len(requests), prompt, params))
    idle = empty(before.limits, before.policy, before.seed)
    engine.state, _ = apply(idle, Arrive(requests))

    # 2. Steps, until all are answered.
    streams = [text_stream(engine.detokenizer) for _ in requests]
    steps: list[Step] = []
    times: list[list[float]] = [[] for _ in requests]
    start = time.perf_counter()
    while is_busy(engine.state):
        timed, answered = _step(engine, streams)
        steps.append(timed)
        now = time.perf_counter() - start
        for i in answered:
            times[i].append(now)
    return Report(
        workload=workload,
        steps=steps,
        seconds=time.perf_counter() - start,
        first=[each[0] for each in times],
        last=[each[-1] for each in times],
    )


def _step(engine: Engine, streams: list[TextStream]) -> tuple[Step, list[int]]:
    """A step and its text, with a clock; also which requests got a token."""
    marks = [time.perf_counter()]
    seen: dict[str, Any] = {}

    def observe(part: str, result: Any) -> Any:
        marks.append(time.perf_counter())
        seen[part] = result
        return result

    # 1. The step, and the text of its tokens.
    engine.state, engine.kv, output = step(
        engine.steps, engine.forward, engine.params, engine.state, engine.kv, observe
    )
    answered = [int(found.id) for found in output.requests]
    for i, token in zip(answered, output.tokens.tolist(), strict=True):
        streams[i], _ = read(streams[i], [token])
    observe("detokenize", None)

    # 2. What it took.
    state, plan = seen["schedule"]
    seconds = [after - before for before, after in itertools.pairwise(marks)]
    timed = Step(
        seconds=dict(zip(PARTS, seconds, strict=True)),
        n_tokens=plan.n_tokens,
        rows=state.rows,
        block_size=state.limits.block_size,
    )
    return timed, answered


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
    a = torch.ones(n, n, dtype=dtype)
    b = torch.ones(n, n, dtype=dtype)
    return 2 * n**3 / best(lambda: a @ b)


def _used(engine: Engine) -> Iterator[tuple[Any, float]]:
    """Each weight of the layers, and what share of it one token is multiplied with: of experts only
    the active ones."""
    spec = engine.checkpoint.spec
    for i, layer in enumerate(engine.params["layers"]):
        table = layer_table(spec, i)
        experts = spec.experts[i]
        for name, weight in layer.items():
            share = 1.0
            if experts is not None and table[name].kind == "experts":
                share = experts.n_active / experts.n_experts
            yield weight, share


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
    if at_most is None:
        sign, wanted, missed = ">=", at_least, 1 - value / at_least
    else:
        sign, wanted, missed = "<=", at_most, value / at_most - 1
    verdict = "met" if missed <= 0 else f"missed by {_text(100 * missed)} %"
    return f"{sign} {_text(float(wanted))}: {verdict}"


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
    limit = bandwidth()
    report = serve(engine, workload)
    per_token = (report.last[0] - report.first[0]) / max(1, report.n_output - 1)
    length = len(workload.prompts[0]) + report.n_output / 2  # that a token reads, on average
    n_read = weight_bytes(engine) + length * kv_bytes(engine)
    return {
        "model": engine.name,
        "first token ms": report.first[0] * 1e3,
        "ms per token": per_token * 1e3,
        "tokens/s": 1 / per_token,
        "bandwidth GB/s": limit / 1e9,
        "share of it": n_read / per_token / limit,
        "host share": report.host_share,
    }


def quick(model: str | None, dtype: str, n: int) -> None:
    """What `nva bench` prints: n requests together, then one alone. bench/ asks more, with more
    options."""
    engine = open_model(model, dtype, max_rows=n, max_model_len=1024)
    together = random_workload(0, n, (100, 512), (100, 256))
    show("many requests together", [throughput(engine, together)])
    alone = random_workload(1, 1, (64, 64), (128, 128))
    show("one request alone", [latency(engine, alone)])


def show(title: str, rows: Sequence[Mapping[str, Any]], path: str | None = None) -> None:
    """Print rows as a table, and write them to a JSON file if one is named."""
    names = list(rows[0])
    cells = [[_text(row[name]) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    print(title)
    for line in (names, *cells):
        padded = [text.rjust(width) for text, width in zip(line, widths, strict=True)]
        print("  ".join(padded))
    if path:
        Path(path).write_text(json.dumps({"title": title, "rows": list(rows)}, indent=2))


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
