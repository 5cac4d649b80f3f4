"""A kernel of one's own, served by nva.generate: the gated activation of the MLP, in plain torch.

    python examples/own_kernel.py [--model FOLDER]

A device's kernels are a record of functions; nva/kernels/__init__.py says what each computes. Yours
are compared with the reference when the model loads, so a wrong one is refused before it answers.
An operator of your own, with a kernel for an NPU, is custom_operator.py."""

from __future__ import annotations

import argparse

import attrs
import torch.nn.functional as F
from torch import Tensor

import nva
from nva.kernels import Kernels


def silu_mul(x: Tensor) -> Tensor:
    """silu(gate) * up for x [T, 2I] = (gate, up)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def swapped(x: Tensor) -> Tensor:
    """Wrong: it takes the second half for the gate."""
    up, gate = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def with_mine(own: Kernels) -> Kernels:
    """The device's own kernels, but for one."""
    return attrs.evolve(own, silu_mul=silu_mul)


def with_wrong(own: Kernels) -> Kernels:
    """The device's own kernels, but for one that is wrong."""
    return attrs.evolve(own, silu_mul=swapped)


def main() -> None:
    """Answer a prompt with each kernel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub id; the demo model by default")
    args = parser.parse_args()
    params = nva.SamplingParams(temperature=0, max_tokens=12)
    for change in (with_mine, with_wrong):
        try:
            engine = nva.load(args.model, kernels=change, max_model_len=256)
        except (ValueError, RuntimeError) as error:
            print(f"{change.__name__}: refused: {error}")
            continue
        (answer,) = nva.generate(engine, "The capital of France is", params)
        print(f"{change.__name__}: {answer.text!r}")


if __name__ == "__main__":
    main()
