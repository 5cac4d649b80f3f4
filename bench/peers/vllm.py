"""vLLM's CPU build, compiled, its engine in the same interpreter: no messages between workers in
its way."""

from __future__ import annotations

import os
import time

from bench.peers.protocol import Serve

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "6",
}  # read when it is imported; GiB

import vllm
from vllm.sampling_params import RequestOutputKind


def open_peer(model: str, dtype: str) -> Serve:
    """Serve from a checkpoint's folder; compiling takes a minute or more."""
    sizes = {"max_model_len": 2304, "max_num_seqs": 32, "max_num_batched_tokens": 2048}
    served = vllm.LLM(
        model, dtype=dtype, enable_prefix_caching=True, skip_tokenizer_init=True, **sizes
    )
    engine = served.llm_engine

    def serve(prompts: list[list[int]], output_lens: list[int]) -> tuple[float, float, int]:
        start, first, n_output = time.perf_counter(), 0.0, 0
        for i, (ids, n) in enumerate(zip(prompts, output_lens, strict=True)):
            engine.add_request(str(i), {"prompt_token_ids": ids}, _greedy(n))
        while engine.has_unfinished_requests():
            n_output += sum(len(found.outputs[0].token_ids) for found in engine.step())
            if n_output and not first:
                first = time.perf_counter() - start
        return first, time.perf_counter() - start, n_output

    return serve


def _greedy(n: int) -> vllm.SamplingParams:
    kind = RequestOutputKind.DELTA
    return vllm.SamplingParams(
        temperature=0, max_tokens=n, ignore_eos=True, detokenize=False, output_kind=kind
    )
