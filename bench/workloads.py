"""The workloads that nva and its peers are measured by, and what is wanted of each.

W1: many requests of random lengths; W2: one stream; W3: one long prompt; W4: a prefix that all
share. The law: lengths are the same every time, and no round repeats the ids of another, so that no
cache of prompts answers."""

from __future__ import annotations

from nva.bench import SHAPES, Workload, random_workload, shared_workload

FASTER = {"W1": 1.5, "W2": 1.0, "W3": 1.0, "W4": 1.5}
"""How many times as fast as any peer at the same precision nva is to be on a large model; below, on
a small one."""
FASTER_SMALL = FASTER | {"W2": 1.2, "W3": 1.15}
FASTER_THAN_TRANSFORMERS = 2.5


def workloads(model: str | None) -> dict[str, Workload]:
    """The four by name; a large model gets fewer and shorter requests in the first."""
    is_large = model in SHAPES
    many = (16, (100, 512), (100, 256)) if is_large else (32, (100, 1024), (100, 1024))
    return {
        "W1": random_workload(0, *many),
        "W2": random_workload(1, 1, (64, 64), (128, 128)),
        "W3": random_workload(100, 1, (2048, 2048), (1, 1)),
        "W4": shared_workload(3, 32, 1024, 32, 32),
    }


def shifted(workload: Workload, n: int) -> Workload:
    """The same lengths and shared prefixes in other ids."""
    prompts = [
        [100 + (token - 100 + n) % 39_900 for token in prompt] for prompt in workload.prompts
    ]
    return Workload(prompts=prompts, output_lens=workload.output_lens)


def shortened(workload: Workload, n: int) -> Workload:
    """The same prompts, with answers of at most n tokens: to warm up with."""
    return Workload(
        prompts=workload.prompts, output_lens=[min(n, each) for each in workload.output_lens]
    )


def wanted_ratio(peer: str, model: str | None, name: str) -> float:
    """How many times as fast as a peer nva is to be."""
    if peer == "transformers":
        return FASTER_THAN_TRANSFORMERS
    return (FASTER if model in SHAPES else FASTER_SMALL)[name]
