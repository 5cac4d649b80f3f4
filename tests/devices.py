"""A device with some of its functions replaced."""

from __future__ import annotations

from typing import Any

import attrs

from nva.kernels import Device, Kernels


def mutated(device: Device, **functions: Any) -> Device:
    """The device with some of its functions, or of its kernels, replaced."""
    names = attrs.fields_dict(Kernels).keys() & functions
    kernels = attrs.evolve(device.kernels, **{name: functions.pop(name) for name in names})
    return attrs.evolve(device, kernels=kernels, **functions)
