"""What attention over a photograph's patches holds in memory, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

RUN = """
import contextlib, resource, sys, torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from nva.kernels import backend, reference
from nva.kernels.cpu.device import PLAIN

device, dtype = sys.argv[1], getattr(torch, sys.argv[2])
is_plain = sys.argv[3] == "MATH"
n_patches, n_heads, head_dim = map(int, sys.argv[4:])
kernels = (PLAIN if device == "plain" else backend("cpu")).kernels
x = torch.randn(n_patches, 3 * n_heads, head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
q, k, v = x.split(n_heads, dim=1)

with sdpa_kernel([SDPBackend.MATH]) if is_plain else contextlib.nullcontext():
    kernels.vision_attention(q[:64], k[:64], v[:64], 0.3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = kernels.vision_attention(q, k, v, 0.3)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

# Some patches worked out one by one.
for patch in (0, 511, 512, n_patches - 1):
    for head in (0, n_heads - 1):
        scores = k[:, head].double() @ q[patch, head].double() * 0.3
        torch.testing.assert_close(
            out[patch, head].double(), scores.softmax(0) @ v[:, head].double(), atol=2e-2, rtol=2e-2
        )
print((after - before) // 1024)
"""


def mebibytes(*args: object) -> int:
    """The memory that one call takes beyond its inputs, at its peak."""
    command = [sys.executable, "-W", "ignore", "-c", RUN, *map(str, args)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(found.stdout)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("device", ["plain", "compiled"])
def test_scores_of_all_patches_are_never_held(device: str, dtype: str) -> None:
    """They would be 800 MB."""
    assert mebibytes(device, dtype, "any", 5_000, 8, 8) < 100


def test_they_are_not_where_torch_has_no_kernel_that_saves_memory() -> None:
    """As on a GPU with a size of heads that none is made for."""
    assert mebibytes("plain", "float32", "MATH", 5_000, 8, 8) < 300


@pytest.mark.slow
def test_a_photograph_of_12_megapixels() -> None:
    """Of 46,000 patches, whose scores would be 34 GB."""
    assert mebibytes("compiled", "bfloat16", "any", 46_000, 4, 16) < 500
