"""What a fork needs, so that the child can compute as its parent does (multiprocessing forks by
default on Linux before Python 3.14).

The law: a child never waits for a thread of its parent, since it has none of them. Compiled kernels
make threads of their own again (kernels/cpu/threads.cpp)."""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_held = threading.local()


@functools.cache
def survive_forks() -> None:
    """Have forks of this process prepared, from now on. Elsewhere than on Unix there are none."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
        )


def lock_across_forks() -> Any:
    """A reentrant lock that no other thread holds while the process forks: a fork waits for it, and
    the child finds it free, with all that it guards as it is between two holders."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _before_fork() -> None:
    _held.locks = list(_locks)
    _acquire_all(_held.locks)
    _stop_openmp()


def _acquire_all(locks: list[Any]) -> None:
    """Hold all locks, in whatever order other threads take them: who finds one taken lets go of
    all, and waits for that one first."""
    first = 0
    while locks:
        order = [*locks[first:], *locks[:first]]
        order[0].acquire()
        n_held = 1
        while n_held < len(order) and order[n_held].acquire(blocking=False):
            n_held += 1
        if n_held == len(order):
            return
        for lock in order[:n_held]:
            lock.release()
        first = (first + n_held) % len(locks)


def _after_fork() -> None:
    for lock in _held.locks:
        lock.release()
    _held.locks = []


def _stop_openmp() -> None:
    """End the threads that OpenMP keeps for this one. The child of a fork would wait for them
    forever in torch's first loop; parent and child both start new ones when they need them."""
    if "torch" in sys.modules and (pause := _pause()):
        soft = 1  # omp_pause_soft: threads end, settings stay
        pause(soft)


@functools.cache
def _pause() -> Any:
    """OpenMP 5.0's function; None where the process has another OpenMP or none."""
    import ctypes

    return getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
