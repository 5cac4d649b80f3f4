"""Whole runs of the engine in which two forwards compute every step, and what happened in them.

The law: both forwards get the same batches, and the reference's tokens decide how the run goes on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np
import torch

from nva.forward import Forward, empty_kv
from nva.models import ModelSpec, Params
from nva.state.engine import check, empty, is_busy
from nva.state.limits import Limits
from nva.state.media import Image, Media, Placed, image, media
from nva.state.request import Request, SamplingParams, request
from nva.steps.commit import commit
from nva.steps.pack import pack
from nva.steps.sample import sample
from nva.steps.schedule import schedule
from nva.steps.submit import submit


@attrs.frozen(kw_only=True)
class Side:
    """A forward with the weights in its own form."""

    forward: Forward
    params: Params


@attrs.define(kw_only=True)
class Report:
    """What happened in a run; `deviation` is the worst, in standard deviations of the reference's
    logits."""

    deviation: float = 0.0
    n_steps: int = 0
    n_mixed: int = 0  # steps with decode rows and chunks together
    n_chunks: int = 0  # prefills that took more than one step
    n_padded: int = 0
    n_hits: int = 0
    n_copies: int = 0
    n_preempted: int = 0
    n_images: int = 0  # spans of images
    n_cut: int = 0  # those that a step cut
    shapes: set[tuple[int, int, int]] = attrs.field(factory=set)  # tokens, rows, logits


def limits_for(spec: ModelSpec, **changes: int | tuple[int, ...]) -> Limits:
    """Limits of the NPU: blocks of 128, and few buckets."""
    fields = {
        "vocab_size": spec.vocab_size,
        "max_model_len": 640,
        "n_blocks": 16,
        "block_size": 128,
        "max_rows": 5,
        "max_batched_tokens": 256,
        "position_axes": 3 if spec.rope_axes else 1,
        "token_buckets": (8, 64, 256),
        "row_buckets": (6,),
    }
    return Limits(**{**fields, **changes})


def requests_for(spec: ModelSpec, n: int = 6) -> list[Request]:
    """Prompts that are shorter than a block, longer than a chunk, equal in their first block, and
    sampled twice. If the model sees, some have an image or two: one that chunks cut, one in what is
    equal, others in the last two."""
    random = np.random.default_rng(3)
    shared = random.integers(0, spec.vocab_size, 140)
    lengths = [3, 300, 129, 1, 60, 128][:n]
    prompts = [random.integers(0, spec.vocab_size, length) for length in lengths]
    prompts += [np.concatenate([shared, prompts[0]]), np.concatenate([shared, prompts[-1]])]
    samples = [1, 1, 2, 1, 1, 1, 1, 2]
    seen = (
        images_for(spec, [len(prompt) for prompt in prompts])
        if spec.vision
        else [None] * len(prompts)
    )
    return [
        request(i, prompt, SamplingParams(temperature=0.8, seed=i, n=n, max_tokens=6), media=each)
        for i, (prompt, n, each) in enumerate(zip(prompts, samples, seen, strict=False))
    ]


def images_for(spec: ModelSpec, lengths: Sequence[int]) -> list[Media | None]:
    """The images of the prompts, given as prompt: [(start, rows, columns, which)]."""
    placed = {
        1: [(110, 12, 13, 0)],
        4: [(3, 2, 5, 1), (20, 4, 3, 2)],
        6: [(9, 6, 7, 3)],
        7: [(9, 6, 7, 3)],
    }
    return [
        media(
            [Placed(image=picture(spec, *size), start=start) for start, *size in placed[i]], length
        )
        if i in placed
        else None
        for i, length in enumerate(lengths)
    ]


def picture(spec: ModelSpec, n_rows: int, n_columns: int, seed: int) -> Image:
    """An image of noise."""
    shape = n_rows * n_columns * spec.vision.merge_size**2, math.prod(spec.vision.patch_shape)
    return image(np.random.default_rng(seed).standard_normal(shape, np.float32), n_rows, n_columns)


def compare(
    spec: ModelSpec,
    limits: Limits,
    reference: Side,
    tested: Side,
    requests: Sequence[Request],
    dtype: torch.dtype = torch.float32,
) -> Report:
    """Run the requests to their ends, half of them submitted after the third step."""
    report, state = Report(), empty(limits)
    kvs = [empty_kv(spec, limits, dtype) for _ in range(2)]
    state = submit(state, requests[: len(requests) // 2])
    late = list(requests[len(requests) // 2 :])
    while is_busy(state) or late:
        if late and report.n_steps == 3:
            state, late = submit(state, late), []
        state, plan = schedule(state)
        batch, draw = pack(state, plan)
        logits, kvs[0] = reference.forward(reference.params, kvs[0], batch)
        tested_logits, kvs[1] = tested.forward(tested.params, kvs[1], batch)
        real, other = logits[: batch.n_logits], tested_logits[: batch.n_logits]
        if batch.n_logits:
            deviation = float((real - other).abs().max() / real.std())
            report.deviation = float(
                np.maximum(report.deviation, deviation)
            )  # unlike max(), keeps a NaN
        record(report, plan, batch)
        state, _ = commit(state, plan, sample(logits, draw))
        check(state)
    return report


def record(report: Report, plan: object, batch: object) -> None:
    """Count what a step did."""
    report.n_steps += 1
    report.n_mixed += bool((plan.counts == 1).any() and (plan.counts > 1).any())
    report.n_chunks += int(((plan.starts > 0) & (plan.counts > 1)).sum())
    report.n_padded += len(batch.token_ids) > batch.n_tokens
    report.n_hits += plan.n_hit
    report.n_copies += len(plan.copies)
    report.n_preempted += len(plan.preempted)
    report.n_images += len(batch.images)
    report.n_cut += sum(span.count < span.image.n_tokens for span in batch.images)
    report.shapes.add((len(batch.token_ids), len(batch.query_ends), len(batch.logit_index)))
