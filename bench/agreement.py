"""How far bfloat16 moves the demo model: nva and transformers in bfloat16, each against
transformers in float32.

    python -m bench.agreement [--tokens 32]

Prints the root mean square error of the log-probabilities after each prompt, over the vocabulary,
and how many greedy tokens agree before the first that differs. Greedy texts part at near ties, so
the second figure is coarse: what counts is that ours is no worse than transformers' own."""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM

import nva
from nva.loading.find import demo_folder

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at",
    "To be, or not to be,",
    "The three laws of robotics are",
    "In 1969, humans first",
    "A recipe for bread: take",
    "Q: What is photosynthesis?\nA:",
    "The derivative of x^2 is",
    "List of countries in Europe:\n1.",
    "Roses are red,",
]


def logprobs(model: torch.nn.Module, ids: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities of the next token, [vocab_size] float32."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)


def greedy(model: torch.nn.Module, ids: tuple[int, ...], n: int) -> list[int]:
    """The n likeliest tokens that follow, one after another, whatever they are."""
    out = model.generate(
        torch.tensor([ids]), max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0
    )
    return out[0, len(ids) :].tolist()


def n_common(a: list[int], b: list[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32)
    n = parser.parse_args().tokens
    exact, theirs = (
        AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=t)
        for t in (torch.float32, torch.bfloat16)
    )
    engine = nva.load(demo_folder(), dtype="bfloat16", max_model_len=512, n_blocks=400)
    params = nva.SamplingParams(temperature=0, max_tokens=n, min_tokens=n, logprobs=49152)
    errors, common = torch.zeros(2), [0, 0]
    for answer in nva.generate(engine, PROMPTS, params):
        ids = answer.prompt_token_ids
        tokens, values = zip(*answer.logprobs[0].top, strict=True)
        ours = torch.empty(len(tokens)).index_put((torch.tensor(tokens),), torch.tensor(values))
        expected, wanted = logprobs(exact, ids), greedy(exact, ids, n)
        errors += torch.stack(
            [(found - expected).square().mean() for found in (ours, logprobs(theirs, ids))]
        )
        for i, found in enumerate((list(answer.token_ids), greedy(theirs, ids, n))):
            common[i] += n_common(found, wanted)
    for name, error, count in zip(
        ("nva", "transformers"), (errors / len(PROMPTS)).sqrt().tolist(), common, strict=True
    ):
        print(
            f"{name:>14} bf16: error {error:.3f}, {count / len(PROMPTS):.1f} of {n} greedy tokens "
            "as in float32"
        )


if __name__ == "__main__":
    main()
