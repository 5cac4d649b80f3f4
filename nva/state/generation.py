"""Which cache a state belongs to: a digest of all that was written to it, in state and cache alike.

The law: a state that expects something of a cache is continued on no other. A counter would not do,
since two branches of one state reach the same count. Read next: steps/schedule.py, which names the
next generation; forward.py, which compares them; steps/recover.py, whose cold() starts anew."""

from __future__ import annotations

import hashlib

COLD = b""
"""The generation of a state that expects nothing of a cache, and of a cache nothing is expected
of."""


def digest(*parts: bytes) -> bytes:
    """32 bytes that tell these parts from all others: the same in every process."""
    return hashlib.sha256(b"".join(parts)).digest()


def check_generation(expected: bytes, held: bytes) -> None:
    """Raise ValueError if a batch expects another generation of the cache than it holds."""
    if expected not in (COLD, held):
        raise ValueError(
            "this state was made for another moment of the KV cache: other steps have written to "
            "the cache since, or it is not the cache that this state's steps wrote to. Go on from "
            "the newest state and its handle, or from cold(state) (nva.steps.recover), which "
            "computes every row again and fits any cache"
        )
