"""transformers' own generate, with its SDPA attention: one padded batch for each workload."""

from __future__ import annotations

import time

import torch
import transformers

from bench.peers.protocol import Serve


def open_peer(model: str, dtype: str) -> Serve:
    """Serve with a checkpoint's folder."""
    served = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype)
    ).eval()

    @torch.inference_mode()
    def serve(prompts: list[list[int]], output_lens: list[int]) -> tuple[float, float, int]:
        """It can't join or leave a batch, so all rows go on until the longest answer is done."""
        ids, mask = _padded(prompts)
        times: list[float] = []
        clock = transformers.LogitsProcessorList(
            [lambda _, scores: times.append(time.perf_counter()) or scores]
        )
        n, start = max(output_lens), time.perf_counter()
        options = {"max_new_tokens": n, "min_new_tokens": n, "do_sample": False, "pad_token_id": 0}
        found = served.generate(ids, attention_mask=mask, logits_processor=clock, **options)
        whole, n_found = time.perf_counter() - start, found.shape[1] - ids.shape[1]
        return times[0] - start, whole, sum(min(n, n_found) for n in output_lens)

    return serve


def _padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask
