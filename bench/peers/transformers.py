"""transformers' own generate, with its SDPA attention: one padded batch for each workload."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import transformers

from nva.bench import SHAPES, Workload
from nva.load import find_model


def open_peer(model: str | None, dtype: str) -> Callable[[Workload], tuple[float, float]]:
    """A function that serves a workload: seconds to the first token of all, and seconds in all."""
    kind = getattr(torch, dtype)
    if model in SHAPES:
        config = transformers.AutoConfig.for_model(**SHAPES[model])
        served = transformers.AutoModelForCausalLM.from_config(config, dtype=kind).eval()
    else:
        served = transformers.AutoModelForCausalLM.from_pretrained(find_model(model), dtype=kind).eval()

    @torch.inference_mode()
    def serve(workload: Workload) -> tuple[float, float]:
        """It can't join or leave a batch, so all rows go on until the longest answer is done."""
        ids, mask = _padded(workload)
        times: list[float] = []
        clock = transformers.LogitsProcessorList([lambda _, scores: times.append(time.perf_counter()) or scores])
        n, start = max(workload.output_lens), time.perf_counter()
        options = {"max_new_tokens": n, "min_new_tokens": n, "do_sample": False, "pad_token_id": 0}
        served.generate(ids, attention_mask=mask, logits_processor=clock, **options)
        return times[0] - start, time.perf_counter() - start

    return serve


def _padded(workload: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, workload.prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in workload.prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in workload.prompts])
    return ids, mask
