"""torch's OpenMP, told not to waste cores.

The law: what the user has set stays. OpenMP reads its settings when torch is imported: so this
comes first, and changes nothing if torch is there already."""

from __future__ import annotations

import os
import sys

from nva.host.cores import cpu_quota, n_cores

SPIN_COUNT = 1000
"""Turns that an OpenMP thread waits for work before it sleeps, some 50 us. GNU's default, 300,000,
keeps a core busy for milliseconds after each of torch's loops, and the kernels' own threads from
it."""


def set_up_openmp() -> None:
    """Let OpenMP's threads sleep soon, and be no more than the CPU quota allows."""
    if "torch" in sys.modules:
        return
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    if cpu_quota():
        os.environ.setdefault("OMP_NUM_THREADS", str(n_cores()))
