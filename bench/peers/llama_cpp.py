"""llama.cpp by way of llama-cpp-python: one request after another, as its Python interface serves them."""

from __future__ import annotations

import time
from collections.abc import Callable

from nva.bench import Workload


def open_peer(model: str | None, dtype: str) -> Callable[[Workload], tuple[float, float]]:
    """A function that serves a workload from a GGUF file: seconds to the first token of all, and seconds in all."""
    from llama_cpp import Llama

    if model is None or not model.endswith(".gguf"):
        raise ValueError(f"llama.cpp reads GGUF files; give the model as one with --peer-model, not {model!r}")
    served = Llama(model, n_ctx=4096, n_batch=2048, verbose=False)

    def serve(workload: Workload) -> tuple[float, float]:
        start, first = time.perf_counter(), 0.0
        for prompt, n in zip(workload.prompts, workload.output_lens, strict=True):
            for i, _ in zip(range(n), served.generate(prompt, temp=0.0), strict=False):
                first = time.perf_counter() - start if i == 0 else first
        return first, time.perf_counter() - start

    return serve
