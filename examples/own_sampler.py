"""Samplers of one's own, served by nva.generate: one without memory, and one that adapts to what it
drew.

    python examples/own_sampler.py [--model FOLDER]

A sampler is a function of the logits [L, V] and a Draw, which says for each sample which row of the
logits is its own, its parameters and whose it is. Both here change the logits and leave the draw to
nva's own, so seeds, penalties and filters work as ever; the log-probabilities that a request asks
for are then of the changed distribution."""

from __future__ import annotations

import argparse

import attrs
import numpy as np
import torch
from torch import Tensor

import nva
from nva.state.plan import Draw, Sampled
from nva.steps.sample import sample

N_SIGMA = 1.0

Bounds = dict[tuple[int, int], float]  # (arrival of the request, sample) -> nats
TARGET = 3.0  # nats of surprise at each token
RATE = 0.2  # how fast a bound follows what was drawn
MAX_BOUNDS = 4096  # the oldest are forgotten


def top_n_sigma(logits: Tensor, draw: Draw) -> Sampled:
    """Leave out tokens whose logit lies more than N_SIGMA standard deviations below the largest
    (Tang et al. 2024, top-n-sigma)."""
    least = logits.amax(-1, keepdim=True) - N_SIGMA * logits.std(-1, keepdim=True)
    return sample(logits.masked_fill(logits < least, -torch.inf), draw)


def mirostat_step(bounds: Bounds, logits: Tensor, draw: Draw) -> tuple[Bounds, Sampled]:
    """Leave out tokens that would surprise by more than the sample's bound, then move the bound
    towards the target (Basu et al. 2021, Mirostat 2.0)."""
    names = list(zip(draw.arrivals.tolist(), draw.samples.tolist(), strict=True))
    known = [bounds.get(name, 2 * TARGET) for name in names]
    bound = torch.tensor(known, device=logits.device)[:, None]

    # 1. A row of logits for each sample: those of one prompt share one, but not the bound.
    x = logits[draw.logit_rows.tolist()]
    surprise = -x.log_softmax(-1)
    is_likeliest = surprise == surprise.amin(-1, keepdim=True)
    kept = x.masked_fill((surprise > bound) & ~is_likeliest, -torch.inf)
    own_rows = len(logits) + np.arange(len(names))
    sampled = sample(torch.cat([logits, kept]), attrs.evolve(draw, logit_rows=own_rows))

    # 2. What was drawn moves the bounds. The state before is left as it was.
    drawn = torch.tensor(sampled.tokens, device=logits.device)[:, None].long()
    moved = bound - RATE * (surprise.gather(1, drawn) - TARGET)
    after = bounds | dict(zip(names, moved[:, 0].tolist(), strict=True))
    return dict(list(after.items())[-MAX_BOUNDS:]), sampled


mirostat = nva.Sampler(init=dict, step=mirostat_step)


def main() -> None:
    """Answer one prompt with each sampler."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub id; the demo model by default")
    args = parser.parse_args()
    params = nva.SamplingParams(temperature=1.0, seed=1, max_tokens=24)
    for name, sampler in (("top-n-sigma", top_n_sigma), ("mirostat", mirostat)):
        try:
            engine = nva.load(args.model, steps=nva.Steps(sample=sampler), max_model_len=256)
        except ValueError as error:
            parser.error(str(error))
        (answer,) = nva.generate(engine, "The sea is", params)
        print(f"{name}: {answer.text!r}")


if __name__ == "__main__":
    main()
