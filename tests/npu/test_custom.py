"""The example of a custom operator on an NPU: its kernel is one fused operator, and so is its
conversion."""

from __future__ import annotations

import collections

import pytest
import torch
import torchair

from examples import custom_operator as custom
from tests.npu import emulation, lowering

assert emulation.OPERATORS, "importing it gives the operators their CPU meaning"


@pytest.fixture(scope="module", autouse=True)
def registered():
    custom.register_npu()


def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((5, 3, 8), (5, 8), (5, 8))]


def test_the_conversion_gives_one_fused_operator_with_the_same_meaning():
    with torch.no_grad(), lowering.caught() as found:
        backend = torchair.get_npu_backend(compiler_config=torchair.CompilerConfig())
        out = torch.compile(custom.rotary, backend=backend, dynamic=False, fullgraph=True)(
            *inputs()
        )
    torch.testing.assert_close(out, custom.rotary(*inputs()))
    kinds = {"Data": 3, "Unsqueeze": 3, "RotaryMul": 1, "Squeeze": 1, "NetOutput": 1}
    assert found[0].counts == collections.Counter(kinds)


def test_the_kernel_has_the_same_meaning():
    """Under the stubs no tensor lies on an NPU, so the kernel is called as it was registered for
    one."""
    kernel = custom.rotary._backend_fns["npu"]
    torch.testing.assert_close(kernel(*inputs()), custom.rotary(*inputs()))
    assert torch._C._dispatch_has_kernel_for_dispatch_key("nva::rotary", "PrivateUse1")
