"""llama.cpp by its C interface: prompts one after another, then all rows decode together in one
batch.

Its Python class serves one request at a time; this does what its server does. A prefix that all
prompts share is computed once and its cache copied. The cache is float16, as by default."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import llama_cpp
import numpy as np

from bench.peers.protocol import Serve, n_cores

Tokens = list[tuple[int, int, int, bool]]
"""What a batch holds: token, position, sequence, and whether its logits are wanted."""
STEP = 2048


def open_peer(model: str, dtype: str) -> Serve:
    """Serve from a GGUF file, in the type that it holds."""
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    weights = llama_cpp.llama_model_load_from_file(
        model.encode(), llama_cpp.llama_model_default_params()
    )
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(weights))
    opened: dict[tuple[int, int], Any] = {}

    def serve(prompts: list[list[int]], output_lens: list[int]) -> tuple[float, float, int]:
        size = len(prompts), max(len(ids) + n for ids, n in zip(prompts, output_lens, strict=True))
        if size not in opened:
            for other in opened.values():
                llama_cpp.llama_free(other)
            opened.clear()
            opened[size] = _session(weights, *size)
        session = opened[size]
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(session), False)
        return _served(
            lambda tokens: _decode(session, n_vocab, tokens), session, prompts, output_lens
        )

    return serve


def _session(weights: Any, n_rows: int, length: int) -> Any:
    """A cache for n_rows sequences of some length."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max = n_rows * (-(-length // 256) * 256), n_rows
    params.n_batch, params.n_threads, params.n_threads_batch = STEP, n_cores(), n_cores()
    return llama_cpp.llama_init_from_model(weights, params)


def _served(
    decode: Any, session: Any, prompts: list[list[int]], output_lens: list[int]
) -> tuple[float, float, int]:
    start, n_shared = time.perf_counter(), _share_prefix(decode, session, prompts)
    answers, first = list[list[int]](), 0.0
    for row, prompt in enumerate(prompts):
        answers.append([_prefill(decode, prompt, n_shared, row)])
        first = first or time.perf_counter() - start
    while rows := [row for row, answer in enumerate(answers) if len(answer) < output_lens[row]]:
        tokens = [
            (answers[row][-1], len(prompts[row]) + len(answers[row]) - 1, row, True) for row in rows
        ]
        for row, token in zip(rows, decode(tokens), strict=True):
            answers[row].append(token)
    return first, time.perf_counter() - start, sum(map(len, answers))


def _share_prefix(decode: Any, session: Any, prompts: list[list[int]]) -> int:
    """Compute what all prompts begin with in row 0, copy it to the others, and tell its length."""
    n_shared = len(os.path.commonprefix(prompts)) if len(prompts) > 1 else 0
    if n_shared:
        _prefill(decode, prompts[0][:n_shared], 0, 0)
        for row in range(1, len(prompts)):
            llama_cpp.llama_memory_seq_cp(llama_cpp.llama_get_memory(session), 0, row, -1, -1)
    return n_shared


def _prefill(decode: Any, prompt: list[int], start: int, row: int) -> int:
    """Compute a prompt from a position on, and give the token that follows it."""
    tokens = [(prompt[i], i, row, i == len(prompt) - 1) for i in range(start, len(prompt))]
    found = [decode(tokens[i : i + STEP]) for i in range(0, len(tokens), STEP)]
    return found[-1][0]


def _decode(session: Any, n_vocab: int, tokens: Tokens) -> list[int]:
    """Compute a batch, and give the likeliest token where logits are wanted."""
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, (token, position, row, is_wanted) in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.logits[i] = token, position, is_wanted
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
    failed = llama_cpp.llama_decode(session, batch)
    llama_cpp.llama_batch_free(batch)
    if failed:
        raise RuntimeError(f"llama_decode gave {failed} for {len(tokens)} tokens")
    wanted = [i for i, (*_, is_wanted) in enumerate(tokens) if is_wanted]
    logits = [llama_cpp.llama_get_logits_ith(session, i) for i in wanted]
    return [int(np.ctypeslib.as_array(row, (n_vocab,)).argmax()) for row in logits]
