"""The kernels' own threads: the same bits whoever computes what, and no thread that others wait
for in vain, be it after a fork, beside other callers or where the system gives no threads."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nva.kernels.cpu import operators

HEADER = """
import ctypes, os, signal, sys, time
{first}
import torch
signal.alarm(60)
import nva
torch.set_num_threads(2)
from nva.kernels.cpu import operators
x = torch.randn(40, 1000, generator=torch.Generator().manual_seed(0))
weight = operators.pack_linear(torch.randn(3000, 1000))
large = torch.randn(1000, 1000)
def product(): return operators.linear(x, weight)
"""


@pytest.fixture
def threads() -> Iterator[None]:
    """More threads than most machines that run this have cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    yield
    torch.set_num_threads(before)


def run(code: str, first: str = "import nva") -> str:
    """What a fresh process prints; it is killed after a minute."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        environment.pop(name, None)
    command = [sys.executable, "-c", HEADER.format(first=first) + code]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, (found.returncode, found.stderr)
    return found.stdout


def products(n: int, seed: int = 0) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    weight = operators.pack_linear(torch.randn(700, 900, generator=random))
    x = torch.randn(n, 900, generator=random)
    norm = operators.rms_norm(x, torch.ones(900), 1e-5)
    return [operators.linear(x, weight), norm, operators.silu_mul(x)]


@pytest.mark.usefixtures("threads")
def test_callers_in_many_threads_get_what_each_gets_alone() -> None:
    sizes = [1, 3, 40, 300]
    expected = {n: products(n) for n in sizes}
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        for n, found in pool.map(lambda n: (n, products(n)), sizes * 20):
            for one, other in zip(found, expected[n], strict=True):
                assert torch.equal(one, other)


@pytest.mark.usefixtures("threads")
def test_all_threads_round_as_the_caller_does() -> None:
    """A product of denormal numbers is zero or isn't, whichever thread computes it."""
    weight = operators.pack_linear(torch.full((2000, 100), 1e-20))
    x = torch.full((30, 100), 1e-20)
    assert (operators.linear(x, weight) > 0).all()
    torch.set_flush_denormal(True)
    try:
        for _ in range(50):
            assert (operators.linear(x, weight) == 0).all()
    finally:
        torch.set_flush_denormal(False)
    for _ in range(50):
        assert (operators.linear(x, weight) > 0).all()


def test_a_forked_child_computes() -> None:
    """With both, since torch's OpenMP would wait for threads that only its parent has."""
    code = """
expected, total = product(), (large @ large).sum()
for _ in range(3):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        found = product()
        has_threads = len(os.listdir("/proc/self/task")) > 1
        is_same = torch.equal(found, expected) and (large @ large).sum() == total
        os._exit(0 if is_same and has_threads else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(product(), expected)
print("done")
"""
    assert run(code) == "done\n"
    assert run(code, first="import torch") == "done\n"


def test_a_child_that_is_forked_while_other_threads_compute_computes() -> None:
    code = """
import threading
expected, is_over = product(), threading.Event()
def go():
    while not is_over.is_set(): product()
others = [threading.Thread(target=go) for _ in range(3)]
for other in others: other.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if torch.equal(product(), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
is_over.set()
for other in others: other.join()
print("done")
"""
    assert run(code) == "done\n"


def test_the_caller_computes_alone_where_the_system_gives_no_threads() -> None:
    """So it waits for nobody who hasn't begun. Stacks of 64 TB can't be had."""
    code = """
libc = ctypes.CDLL(None)
libc.omp_set_num_threads(1)
expected = product().numpy().tobytes()
attributes = ctypes.create_string_buffer(256)
libc.pthread_attr_init(attributes)
assert libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(1 << 46)) == 0
assert libc.pthread_setattr_default_np(attributes) == 0
libc.omp_set_num_threads(2)
before = len(os.listdir("/proc/self/task"))
assert product().numpy().tobytes() == expected
assert len(os.listdir("/proc/self/task")) == before
print("done")
"""
    assert run(code) == "done\n"


@pytest.mark.parametrize("first", ["import nva", "import torch"])
def test_threads_sleep_when_there_is_nothing_to_do(first: str) -> None:
    """OpenMP's spin for milliseconds after each of torch's loops, on a core that others want."""
    code = """
times = []
for _ in range(5):
    for _ in range(20): product(); large + large
    start = time.process_time()
    time.sleep(0.2)
    times.append(time.process_time() - start)
print(min(times))
"""
    assert float(run(code, first)) < 2e-3


def test_signals_are_for_the_program_s_own_threads() -> None:
    """A handler in C that allocates, or one that a debugger set, must not run amid a kernel."""
    code = """
product()
for task in os.listdir("/proc/self/task"):
    lines = open(f"/proc/self/task/{task}/status").read().splitlines()
    (blocked,) = [line.split()[1] for line in lines if line.startswith("SigBlk")]
    print(bool(int(blocked, 16) >> (signal.SIGINT - 1) & 1))
"""
    assert "True" in run(code)
