"""The package `nva`: its names are there when asked for, by whichever way, and cost nothing before."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import nva


def python(code: str, *arguments: str, **environment: str) -> str:
    """What a fresh process prints; it must succeed."""
    child = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


@pytest.mark.parametrize("name", nva.__all__)
def test_every_public_name_is_there_and_listed(name: str) -> None:
    assert getattr(nva, name) is not None
    assert name in dir(nva)


def test_checkers_of_types_are_told_of_the_same_names() -> None:
    tree = ast.parse(Path(nva.__file__).read_text(encoding="utf-8"))
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    told = {alias.name: line.module for line in block.body for alias in line.names}
    assert told == nva._HOMES
    assert set(nva.__all__) == {*nva._HOMES, "__version__"}


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'nva' has no attribute 'generates'"):
        nva.generates  # noqa: B018 - the access is the test
    assert not hasattr(nva, "_private")
    with pytest.raises(ImportError, match="cannot import name 'generates' from 'nva'"):
        from nva import generates  # noqa: F401


def test_modules_of_the_package_are_attributes_too() -> None:
    code = (
        "import nva; nva.kernels.GRAPHS, nva.testing.laws; print(nva.engine.Engine is nva.Engine)"
    )
    assert python(code) == "True\n"


CLASHES = [name for name in nva.__all__ if importlib.util.find_spec(f"nva.{name}")]
ORDERS = [
    "import nva.{name}",
    "import nva; nva.{name}; import nva.{name}",
    "from nva.{name} import stream; import nva",
    "import nva.engine, nva.bench",
    "import nva.cli.main, nva; nva.generate; nva.stream",
    "import importlib, nva; importlib.import_module('nva.{name}'); importlib.reload(nva)",
    "from nva import {name}",
    "from nva import *; import nva",
    "import sys, nva; import nva.{name}; nva.{name}; import nva.{name}",
]


@pytest.mark.parametrize("order", ORDERS)
def test_a_function_named_like_its_module_stays_the_function(order: str) -> None:
    assert CLASHES == ["run"]
    (name,) = CLASHES
    code = f"""{order.format(name=name)}
import inspect, sys, types, nva
assert inspect.isfunction(nva.{name}), nva.{name}
assert isinstance(sys.modules['nva.{name}'], types.ModuleType)
from nva import {name}
assert {name} is nva.{name} is sys.modules['nva.{name}'].{name}
"""
    python(code)


def test_what_is_replaced_by_a_test_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    run = nva.run
    monkeypatch.setattr(nva, "run", len)
    assert nva.run is len
    monkeypatch.undo()
    assert nva.run is run


def test_functions_can_be_pickled_and_signatures_read() -> None:
    for name in ("run", "load", "generate"):
        assert pickle.loads(pickle.dumps(getattr(nva, name))) is getattr(nva, name)
    assert list(inspect.signature(nva.run).parameters)[:3] == ["prompts", "params", "model"]


HEAVY = "torch", "transformers", "huggingface_hub", "torch_npu"
LIGHT = {
    "import nva": "import nva",
    "nva --help": "from nva.cli.main import main; main(['--help'])",
    "nva --version": "from nva.cli.main import main; main(['--version'])",
    "nva": "from nva.cli.main import main; main([])",
    "nva run --help": "from nva.cli.main import main; main(['run', '--help'])",
    "nva chat --help": "from nva.cli.main import main; main(['chat', '--help'])",
    "nva doctor": "from nva.cli.main import main; main(['doctor'])",
    "a wrong flag": "from nva.cli.main import main; main(['run', 'x', '--no-such-flag'])",
    "a value that is refused": "from nva.cli.main import main; main(['run', 'x', '--top-p', '3'])",
    "records": "import nva; nva.SamplingParams(), nva.Options(), nva.Limits, nva.Policy",
}


@pytest.mark.parametrize("what", LIGHT)
def test_what_computes_nothing_imports_no_torch(what: str) -> None:
    code = f"""
import sys
try:
    {LIGHT[what]}
except SystemExit:
    pass
print("loaded:", [name for name in {HEAVY} if name in sys.modules])
"""
    assert python(code).endswith("loaded: []\n")


@pytest.mark.parametrize("arguments", [("doctor",), ("run", "doctor"), ("--help",), ()])
def test_importing_looks_at_no_argument(arguments: tuple[str, ...]) -> None:
    """A user's own script may have any arguments. Of variables, only OpenMP's are set."""
    code = """
import os
for name in ("GOMP_SPINCOUNT", "OMP_NUM_THREADS"):
    os.environ.pop(name, None)
before = dict(os.environ)
import nva, nva.cli.main
nva.Engine
print(sorted(dict(set(os.environ.items()) ^ set(before.items())).keys()))
"""
    found = python(code, *arguments)
    assert found in ("['GOMP_SPINCOUNT']\n", "['GOMP_SPINCOUNT', 'OMP_NUM_THREADS']\n")


def test_two_threads_may_be_the_first_to_ask() -> None:
    code = """
import threading, nva
names, found = [name for name in nva.__all__ if name != "__version__"], []
start = threading.Barrier(8)
def ask(i):
    start.wait()
    for name in names[i:] + names[:i]:
        found.append(getattr(nva, name))
threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
print(len(found) == 8 * len(names), len(set(map(id, found))) == len(names))
"""
    assert python(code) == "True True\n"
