"""Loading: options that can't be had are refused; the cache takes its share of memory; a GPU's path
is walked."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest
import torch

import nva
from nva.forward import empty_kv, make_forward
from nva.kernels import Device, backend
from nva.kernels.cuda import GPU
from nva.loading.warm_up import filled_batch
from nva.models import random_params
from nva.state.limits import Limits
from tests.npu.models import CONFIGS, tiny_spec

load = importlib.import_module("nva.loading.load")
SMALL = {"max_model_len": 64, "max_rows": 4, "n_blocks": 16}


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that sees two GPUs of 9 GB each, a third of each in use."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 * 10**9, 9 * 10**9))


REFUSED = [
    (
        {"enforce_eager": True, "graph": "ge"},
        "enforce_eager never compiles, but graph is 'ge'; give one of them",
    ),
    (
        {"enforce_eager": True, "graph": "aclgraph"},
        "enforce_eager never compiles, but graph is 'aclgraph'",
    ),
    ({"graph": "ge"}, "graph='ge' is for device npu; on cpu leave it at auto"),
    ({"graph": "cuda"}, "graph is 'cuda'; choose one of auto, eager, ge, aclgraph"),
    ({"device": "cuda:x"}, "device is 'cuda:x'; give cpu, cuda, npu, cuda:1"),
    ({"device": "cpu:3"}, "device is 'cpu:3'; give cpu"),
    ({"device": "tpu"}, "device is 'tpu'; give cpu"),
    ({"device": 3}, "device is '3'; give cpu"),
    ({"policy": ["fcfs"]}, r"policy is \['fcfs'\]; choose one of fcfs"),
    ({"cache_memory": "infGiB"}, "memory is 'infGiB'; give bytes"),
    ({"cache_memory": "1e999GiB"}, "memory is '1e999GiB'; give bytes"),
    (
        {"max_rows": 10**8},
        "100000000 rows of up to 8192 tokens .* don't fit .*; lower max_rows, max_model_len, or",
    ),
    ({"max_rows": 10**12}, r"max_rows is 1000000000000; give a whole number in \[1, 2147483647\]"),
    (
        {"n_blocks": 2**31 - 1},
        "2147483647 blocks of 16 tokens, more than slots can be numbered; lower",
    ),
    (
        {"n_blocks": 2**26},
        "a cache of 67108864 blocks .* don't fit .*; lower max_rows, max_model_len, or n_blocks",
    ),
    ({"block_size": 2**31}, "block_size is 2147483648; give a whole number in"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_can_not_be_had_is_refused(demo_model, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        nva.load(demo_model, **options)


def test_a_model_has_a_name() -> None:
    with pytest.raises(ValueError, match="model is 5; give a checkpoint's folder or a hub id"):
        nva.load(5)  # pyright: ignore[reportArgumentType]


def test_eager_may_be_said_twice(demo_model) -> None:
    assert (
        nva.load(demo_model, enforce_eager=True, graph="eager", **SMALL).state.limits.n_blocks == 16
    )


def test_a_gpu_that_is_not_there_is_refused(demo_model, monkeypatch, two_gpus) -> None:
    with pytest.raises(
        ValueError,
        match=r"device is 'cuda:2', but torch .* finds 2 GPUs here; give another, or cpu",
    ):
        nva.load(demo_model, device="cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device is 'cuda', but torch .* finds 0 GPUs here"):
        nva.load(demo_model, device="cuda")


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:1"])
def test_an_engine_for_a_gpu_asks_it_for_memory(demo_model, monkeypatch, two_gpus, device) -> None:
    """Its tensors are put on the CPU here: where they would be and how fast, only a GPU can
    show."""
    placed, memory = [], []

    def on_the_cpu(*args) -> Device:
        found = backend(*args)
        placed.append(str(found.where))
        return attrs.evolve(
            found,
            where=torch.device("cpu"),
            pins_memory=False,
            cache_memory=lambda where: memory.append(where) or 1 << 24,
        )

    monkeypatch.setattr(load, "backend", on_the_cpu)
    engine = nva.load(demo_model, device=device, dtype="float32", max_model_len=64, max_rows=4)
    assert placed == ["cuda" if device == "auto" else device]
    assert len(memory) == 1
    params = nva.SamplingParams(temperature=0, max_tokens=5)
    assert nva.generate(engine, ["The capital of France is"], params)[0].text == " Paris.\n\nThe"


def test_the_cache_of_a_gpu_is_a_third_of_what_is_free(two_gpus) -> None:
    assert GPU.cache_memory(torch.device("cuda:1")) == 2 * 10**9


@pytest.mark.parametrize("name", CONFIGS)
def test_a_forward_names_no_device_but_its_own(name: str) -> None:
    """On torch's device without memory, which refuses tensors of another as a GPU does."""
    spec = tiny_spec(name)
    limits = Limits(vocab_size=spec.vocab_size, position_axes=3 if spec.rope_axes else 1, **SMALL)
    params = random_params(spec, torch.float32, torch.Generator())
    params = torch.utils._pytree.tree_map(lambda tensor: tensor.to("meta"), params)
    device = attrs.evolve(GPU, where=torch.device("meta"), pins_memory=False)
    forward = make_forward(spec, limits, device)
    kv = empty_kv(spec, limits, torch.float32, device)
    logits, _ = forward(params, kv, filled_batch(limits, 7, 3))
    assert logits.shape == (3, spec.vocab_size)
    assert logits.device.type == "meta"


@pytest.mark.parametrize("options", [{"cache_memory": "4MiB"}, {"n_blocks": 5}])
def test_nobody_is_asked_for_free_memory_when_the_cache_has_its_size(
    demo_model, monkeypatch, options
) -> None:
    def fail(_: torch.device) -> int:
        raise AssertionError("asked")

    device = attrs.evolve(backend("cpu"), cache_memory=fail)
    monkeypatch.setattr(load, "backend", lambda *_: device)
    engine = nva.load(demo_model, device="cpu", dtype="float32", max_model_len=64, **options)
    assert engine.state.limits.n_blocks == options.get(
        "n_blocks", (4 << 20) // (2 * 30 * 16 * 3 * 64 * 4)
    )


@pytest.fixture
def copied(tmp_path: Path, demo_model: Path) -> Path:
    """The demo model with configs of its own, and weights that are a link."""
    folder = tmp_path / "a model"
    folder.mkdir()
    for path in demo_model.iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path)
        else:
            shutil.copy(path, folder)
    return folder


def refusal(folder: Path) -> str:
    """What load() says; one line."""
    with pytest.raises(ValueError) as raised:
        nva.load(folder, device="cpu", **SMALL)
    assert "\n" not in str(raised.value)
    return str(raised.value)


CONFIG_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "processor_config.json",
    "model.safetensors.index.json",
]
NO_OBJECTS = {
    "empty": b"",
    "cut short": b'{"a": 1',
    "with a byte order mark": b"\xef\xbb\xbf{}",
    "a list": b"[]",
    "null": b"null",
    "a string": b'"x"',
    "a number": b"NaN",
    "Latin-1": '{"a": "é"}'.encode("latin-1"),
    "UTF-16": "{}".encode("utf-16"),
    "zeros": bytes(64),
    "too deep": b"[" * 100_000,
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n",
}


@pytest.mark.parametrize("name", CONFIG_FILES)
@pytest.mark.parametrize("content", NO_OBJECTS.values(), ids=NO_OBJECTS)
def test_a_file_that_holds_no_object_is_named(copied: Path, name: str, content: bytes) -> None:
    (copied / name).write_bytes(content)
    assert refusal(copied).startswith(f"{copied / name} ")


READ_FILES = [*CONFIG_FILES[:4], "chat_template.jinja", "preprocessor_config.json", "vocab.json"]


@pytest.mark.parametrize("name", READ_FILES)
@pytest.mark.parametrize("kind", ["a broken link", "a loop", "a folder"])
def test_a_file_that_can_not_be_read_is_not_a_missing_one(copied, name: str, kind: str) -> None:
    """In a cache of links, one that leads nowhere would otherwise change answers silently."""
    path = copied / name
    path.unlink(missing_ok=True)
    if kind == "a folder":
        path.mkdir()
    else:
        path.symlink_to(name if kind == "a loop" else "nowhere")
    assert "can't be read ([Errno" in refusal(copied)
    assert str(path) in refusal(copied)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without the rights of root, whom no mode of a file stops."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("name", ["", *READ_FILES[:5]])
def test_what_may_not_be_read_is_named(copied: Path, name: str) -> None:
    for folder in copied.parents:
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    (copied / name).chmod(0)
    with as_nobody():
        assert "Permission denied" in refusal(copied)
    (copied / name).chmod(0o755)


def test_a_model_in_a_folder_that_can_not_be_written_serves(copied: Path) -> None:
    """Also with spaces in its name, by a link, and told as what it is."""
    for path in copied.iterdir():
        if not path.is_symlink():
            path.chmod(0o444)
    copied.chmod(0o555)
    link = copied.with_name("模型")
    link.symlink_to(copied)
    engine = nva.load(link, device="cpu", **SMALL)
    params = nva.SamplingParams(temperature=0, max_tokens=2)
    assert nva.generate(engine, ["The capital of France is"], params)[0].text == " Paris."
    copied.chmod(0o755)


ODD_DEFAULTS = [
    ({"top_p": 0}, "generation_config.json has top_p = 0; give a finite number in (0, 1]"),
    ({"do_sample": "false"}, "generation_config.json has do_sample = 'false'; give true or false"),
    (
        {"max_new_tokens": "many"},
        "generation_config.json has max_new_tokens = 'many'; give a whole",
    ),
    ({"eos_token_id": [None]}, "generation_config.json has eos_token_id = [None]"),
    ({"eos_token_id": [[2]]}, "generation_config.json has eos_token_id = [[2]]"),
    ({"eos_token_id": "2"}, "generation_config.json has eos_token_id = '2'"),
]


@pytest.mark.parametrize(("changes", "message"), ODD_DEFAULTS, ids=str)
def test_odd_defaults_are_refused_when_the_model_loads(copied, changes, message) -> None:
    (copied / "generation_config.json").write_text(json.dumps(changes))
    assert refusal(copied).startswith(message)


def test_what_was_decided_is_said_once(copied: Path, caplog) -> None:
    with caplog.at_level("INFO", "nva"):
        nva.load(copied, device="cpu", dtype="float32", **SMALL)
    (line,) = [message for message in caplog.messages if message.startswith(copied.name)]
    for part in ("on cpu", "float32", " thread", "16 blocks of 16 tokens", "4 rows", "64 tokens"):
        assert part in line
    assert "\n" not in line


def test_two_threads_may_load_at_once(demo_model) -> None:
    code = f"""
import threading, nva
found = []
def work():
    engine = nva.load({str(demo_model)!r}, device="cpu", n_blocks=8, max_rows=2, max_model_len=64)
    found.append(engine.tokenizer is not None)
threads = [threading.Thread(target=work) for _ in range(2)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
print(found)
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.stdout == "[True, True]\n", child.stderr
    (first, second) = [line for line in child.stderr.splitlines() if "rows of up to" in line]
    assert first == second
