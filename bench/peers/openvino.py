"""OpenVINO GenAI: its continuous batching over paged attention, with the prefix cache.

It reads float16 weights from a GGUF file (bfloat16 ones it doesn't read) and computes in the type
that it is asked for."""

from __future__ import annotations

import os
import time

import numpy as np
import openvino
import openvino_genai

from bench.peers.protocol import Serve, n_cores


def open_peer(model: str, dtype: str) -> Serve:
    """Serve from a GGUF file."""
    sizes = openvino_genai.SchedulerConfig()
    sizes.max_num_seqs, sizes.max_num_batched_tokens = 32, 2048
    sizes.cache_size, sizes.enable_prefix_caching, sizes.dynamic_split_fuse = (
        6,
        True,
        True,
    )  # cache in GB
    hints = {"INFERENCE_PRECISION_HINT": {"bfloat16": "bf16", "float32": "f32"}[dtype]}
    hints["INFERENCE_NUM_THREADS"] = str(n_cores())
    served = openvino_genai.ContinuousBatchingPipeline(model, sizes, "CPU", hints)

    def serve(prompts: list[list[int]], output_lens: list[int]) -> tuple[float, float, int]:
        """Only a finished request's blocks are found by others: so a shared prefix is computed
        first, on its own."""
        start, n_shared = (
            time.perf_counter(),
            len(os.path.commonprefix(prompts)) if len(prompts) > 1 else 0,
        )
        if n_shared:
            _answered(served, [prompts[0][:n_shared]], [1])
        first, n_output = _answered(served, prompts, output_lens)
        return first - start, time.perf_counter() - start, n_output

    return serve


def _answered(
    served: openvino_genai.ContinuousBatchingPipeline,
    prompts: list[list[int]],
    output_lens: list[int],
) -> tuple[float, int]:
    """Serve the prompts together: the clock at the first token, and how many tokens came."""
    handles, first = [], 0.0
    for i, (ids, n) in enumerate(zip(prompts, output_lens, strict=True)):
        handles.append(served.add_request(i, openvino.Tensor(np.array([ids])), _greedy(n)))
    while served.has_non_finished_requests():
        served.step()
        if not first and any(handle.can_read() for handle in handles):
            first = time.perf_counter()
    return first, sum(len(found.generated_ids) for handle in handles for found in handle.read_all())


def _greedy(n: int) -> openvino_genai.GenerationConfig:
    return openvino_genai.GenerationConfig(
        max_new_tokens=n, min_new_tokens=n, ignore_eos=True, do_sample=False
    )
