"""Our logits against transformers', at every position, through any schedule of hand-made
batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from nva.forward import KV, empty_kv, make_forward
from nva.kernels import Device
from nva.kernels.cpu.device import PLAIN
from nva.models import ModelSpec, load_checkpoint
from nva.models.params import Params
from nva.state.limits import Limits
from nva.state.media import Media, positions_between
from nva.state.plan import BATCH_ARRAYS, Batch, ImageSpan, batch_of
from tests.checkpoints import MAX_MODEL_LEN, Case, build

TOLERANCE = 1e-4  # of the logits' standard deviation
LIMITS = Limits(
    vocab_size=97,
    max_model_len=MAX_MODEL_LEN,
    n_blocks=64,
    block_size=4,
    max_rows=4,
    max_batched_tokens=256,
    token_buckets=tuple(range(7, 260, 7)),
    row_buckets=(3, 6),
)


@attrs.frozen(kw_only=True, eq=False)
class Subject:
    """A model in both forms, with token ids to compare it on and the logits that transformers
    gives."""

    spec: ModelSpec
    params: Params
    limits: Limits
    rows: list[np.ndarray]
    expected: list[Tensor]
    media: list[Media | None] | None = None  # of the rows, for a model that sees
    device: Device = PLAIN


def subject(case: Case, folder: Path, device: Device = PLAIN) -> Subject:
    """Build a case's checkpoint, load it with ours, run it with theirs."""
    model = build(case, folder)
    checkpoint, params = load_checkpoint(folder, kernels=device.kernels)
    limits = attrs.evolve(LIMITS, max_model_len=case.max_model_len)
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, limits.vocab_size, length) for length in case.lengths]
    expected = [logits_of(model, row) for row in rows]
    return Subject(
        spec=checkpoint.spec,
        params=params,
        limits=limits,
        rows=rows,
        expected=expected,
        device=device,
    )


@torch.inference_mode()
def logits_of(model: PreTrainedModel, row: np.ndarray) -> Tensor:
    """transformers' logits [n, vocab] for a whole prompt without a cache."""
    return model(torch.tensor(row)[None], use_cache=False).logits[0].float()


def deviation(subject: Subject, chunk: int) -> float:
    """The largest difference of any logit, in standard deviations, when rows are computed `chunk`
    tokens at a time."""
    found = compute(subject, chunk)
    differences = [
        (a - b).abs().max() / b.std() for a, b in zip(found, subject.expected, strict=True)
    ]
    return float(max(differences))


def compute(subject: Subject, chunk: int) -> list[Tensor]:
    """Our logits [n, vocab] of every row."""
    forward = make_forward(subject.spec, subject.limits, subject.device)
    kv = poisoned_kv(subject.spec)
    logits: list[list[Tensor]] = [[] for _ in subject.rows]
    for batch, parts in batches(subject.rows, chunk, media=subject.media):
        found, kv = forward(subject.params, kv, batch)
        for row, piece in zip(
            parts, found[: batch.n_logits].split(list(parts.values())), strict=True
        ):
            logits[row].append(piece)
    return [torch.cat(pieces) for pieces in logits]


def poisoned_kv(spec: ModelSpec) -> KV:
    """A cache full of NaN, as freed blocks may be."""
    kv = empty_kv(spec, LIMITS, torch.float32)
    for cache in kv.layers:
        for tensor in cache:
            tensor.fill_(torch.nan)
    return kv


def batches(
    rows: list[np.ndarray], chunk: int, seed: int = 0, media: list[Media | None] | None = None
) -> Iterator[tuple[Batch, dict[int, int]]]:
    """Batches that compute the rows, and how many tokens each row has in each: chunk tokens a row
    and step, in an order drawn anew each time. Row i starts at step i, so that rows at different
    positions, chunks and decodes mix."""
    rng = np.random.default_rng(seed)
    n_blocks = [-(-len(row) // LIMITS.block_size) for row in rows]
    ids = rng.permutation(LIMITS.n_blocks)[: sum(n_blocks)] + LIMITS.n_scratch
    tables = np.split(ids, np.cumsum(n_blocks)[:-1])
    done, step = [0] * len(rows), 0
    while any(n < len(row) for n, row in zip(done, rows, strict=True)):
        active = [
            i for i in rng.permutation(len(rows)).tolist() if i <= step and done[i] < len(rows[i])
        ]
        spans = {i: (done[i], min(done[i] + chunk, len(rows[i]))) for i in active}
        batch = packed(rows, tables, spans)
        yield (
            batch if media is None else with_media(batch, spans, media),
            {i: end - start for i, (start, end) in spans.items()},
        )
        for i, (_, end) in spans.items():
            done[i] = end
        step += 1


def packed(
    rows: list[np.ndarray], tables: list[np.ndarray], spans: dict[int, tuple[int, int]]
) -> Batch:
    """A batch of `[start, end)` of some rows, padded to the next bucket, with logits for every
    token."""
    positions = np.concatenate([np.arange(*span) for span in spans.values()] or [np.zeros(0, int)])
    n, n_rows = len(positions), len(spans)
    n_padded = next(size for size in LIMITS.token_buckets if size >= n)
    n_padded_rows = next(size for size in LIMITS.row_buckets if size > n_rows)
    padding = np.arange(n_padded - n)
    block_tables = np.zeros((n_padded_rows, LIMITS.table_width), int)
    block_tables[n_rows:, : LIMITS.n_scratch] = np.arange(LIMITS.n_scratch)
    slots = []
    for at, (i, span) in enumerate(spans.items()):
        block_tables[at, : len(tables[i])] = tables[i]
        block, offset = np.divmod(np.arange(*span), LIMITS.block_size)
        slots.append(tables[i][block] * LIMITS.block_size + offset)
    n_empty = n_padded_rows - n_rows - 1
    return make_batch(
        token_ids=np.concatenate(
            [*(rows[i][slice(*span)] for i, span in spans.items()), 0 * padding]
        ),
        positions=np.concatenate([positions, padding])[None],
        slots=np.concatenate([*slots, padding]),
        block_tables=block_tables,
        query_ends=np.array(
            [
                *np.cumsum([end - start for start, end in spans.values()]),
                *[n_padded] * (n_empty + 1),
            ]
        ),
        context_lens=np.array(
            [*(end for _, end in spans.values()), max(1, len(padding)), *[1] * n_empty]
        ),
        logit_index=np.concatenate([np.arange(n), 0 * padding]),
        copies=np.zeros((0, 2)),
        n_tokens=n,
        n_rows=n_rows,
        n_logits=n,
    )


def with_media(batch: Batch, spans: dict[int, tuple[int, int]], media: list[Media | None]) -> Batch:
    """The batch for a model with three positions a token, and with the parts of images that its
    tokens show."""
    padding = np.tile(batch.positions[:, batch.n_tokens :], (3, 1))
    positions = [positions_between(media[i], *span) for i, span in spans.items()]
    images, packed_at = [], 0
    for i, (start, end) in spans.items():
        found = media[i]
        for each in found.placed if found else ():
            for position in range(
                max(start, each.start), min(end, each.end)
            ):  # token by token, unlike the engine
                at = packed_at + position - start
                images.append(
                    ImageSpan(image=each.image, first=position - each.start, packed=at, count=1)
                )
        packed_at += end - start
    arrays = {
        field: getattr(batch, field)
        for field in attrs.fields_dict(Batch)
        if field not in ("buffer", "images")
    }
    made = make_batch(**{**arrays, "positions": np.concatenate([*positions, padding], axis=1)})
    return attrs.evolve(made, images=tuple(images))


def make_batch(**fields: Any) -> Batch:
    """A Batch of these arrays, all of whose tokens the host knows."""
    arrays = {name: fields.pop(name) for name in BATCH_ARRAYS if name in fields}
    arrays["token_source"] = np.full(len(arrays["token_ids"]), -1)
    return batch_of(arrays, **fields)
