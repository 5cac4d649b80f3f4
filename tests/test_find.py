"""Finding a model: what its name may be, and what is asked of the hub for it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from nva.loading import find
from nva.loading.find import find_model, name_of

COMMIT = "a" * 40
INDEX = "model.safetensors.index.json"
SMALL = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
]


class Hub:
    """A cache folder of the hub, and what the repository org/demo has at its one commit."""

    def __init__(self, root: Path, source: Path) -> None:
        self.source = source
        self.base = root / "models--org--demo"
        self.folder = self.base / "snapshots" / COMMIT
        self.folder.mkdir(parents=True)
        (self.base / "refs").mkdir()
        (self.base / "refs" / "main").write_text(COMMIT)

    def cache(self, *names: str) -> None:
        """Put files into the cache, as a download would have left them."""
        for name in names:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            is_config = (self.source / name).exists() and not name.endswith(".safetensors")
            text = (self.source / name).read_bytes() if is_config else b"x"
            (self.folder / name).write_bytes(text)

    def shards(self, *names: str) -> None:
        """Cache an index that names these files."""
        weight_map = {f"tensor.{i}": name for i, name in enumerate(names)}
        (self.folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    def lists(self, *names: str) -> None:
        """Keep the repository's list of files, as newer versions of the hub's library do."""
        files = {name: {"size": 1, "blob_id": "0" * 40} for name in names}
        (self.base / "trees").mkdir(exist_ok=True)
        tree = {"format_version": 1, "files": files}
        (self.base / "trees" / f"{COMMIT}.json").write_text(json.dumps(tree))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_model: Path) -> Hub:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return Hub(tmp_path, demo_model)


UNREAD = [
    "README.md",
    "LICENSE.txt",
    "consolidated.safetensors",
    "consolidated-00001-of-00002.safetensors",
    "params.json",
    "tekken.json",
    "original/consolidated.00.pth",
    "original/tokenizer.model",
    "onnx/config.json",
    "onnx/model.onnx",
    "runs/events.json",
    "vae/model.safetensors",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.fp16.safetensors",
    "adapter_model.safetensors",
    "model-q4.gguf",
    "coreml/tokenizer.json",
    "modeling_demo.py",
    "video_preprocessor_config.json",
]


@pytest.mark.parametrize("extra", UNREAD)
def test_a_cache_without_a_network_needs_no_file_that_is_never_read(hub: Hub, extra: str) -> None:
    hub.cache(*SMALL, "model.safetensors")
    hub.lists(*SMALL, "model.safetensors", extra)
    assert find_model("org/demo") == hub.folder


def test_a_cache_without_a_list_of_files_serves_too(hub: Hub) -> None:
    hub.cache(*SMALL, "model.safetensors")
    assert find_model("org/demo") == hub.folder
    assert find_model(f"org/demo@{COMMIT}") == hub.folder
    assert find_model("org/demo@main") == hub.folder


def test_where_there_is_an_index_its_shards_are_all_that_is_needed(hub: Hub) -> None:
    hub.cache(*SMALL, "a.safetensors", "b.safetensors")
    hub.shards("a.safetensors", "b.safetensors")
    hub.lists(*SMALL, INDEX, "a.safetensors", "b.safetensors", "model.safetensors")
    assert find_model("org/demo") == hub.folder


@pytest.mark.parametrize("lacking", ["tokenizer.json", "generation_config.json", "config.json"])
def test_a_cache_that_is_known_to_lack_what_is_read_is_refused(hub: Hub, lacking: str) -> None:
    hub.cache(*(name for name in SMALL if name != lacking), "model.safetensors")
    hub.lists(*SMALL, "model.safetensors")
    with pytest.raises(ValueError, match=f"incomplete: .*{lacking}") as raised:
        find_model("org/demo")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("is_listed", [True, False])
def test_shards_that_are_not_cached_are_named(hub: Hub, is_listed: bool) -> None:
    hub.cache(*SMALL, "a.safetensors")
    hub.shards("a.safetensors", "b.safetensors")
    (hub.folder / "b.safetensors").symlink_to(hub.base / "blobs" / "lost")
    if is_listed:
        hub.lists(*SMALL, INDEX, "a.safetensors", "b.safetensors")
    with pytest.raises(ValueError, match=r"b\.safetensors") as raised:
        find_model("org/demo")
    assert "a.safetensors" not in str(raised.value)


def test_a_revision_that_is_not_cached_is_refused(hub: Hub) -> None:
    hub.cache(*SMALL, "model.safetensors")
    for revision in ("v2", "refs/pr/3", "b" * 40):
        with pytest.raises(ValueError, match=f"no folder org/demo@{revision}, and the hub can't"):
            find_model(f"org/demo@{revision}")


@pytest.fixture
def asked(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that a hub within reach was asked for, which then are in the cache."""
    found: list[str] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert name == "org/demo"
        assert revision in (None, COMMIT)
        files = list(filter_repo_objects(hub.files, allow_patterns=allow_patterns))
        hub.cache(*(file for file in files if not (hub.folder / file).exists()))
        found.extend(files)
        return str(hub.folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return found


def test_the_hub_is_asked_for_what_is_read_alone(hub: Hub, asked: list[str]) -> None:
    hub.files = [*SMALL, "model.safetensors", *UNREAD]
    assert find_model("org/demo") == hub.folder
    assert sorted(asked) == sorted([*SMALL, "model.safetensors"])


def test_of_weights_the_index_decides(hub: Hub, asked: list[str]) -> None:
    hub.shards("a.safetensors", "b.safetensors")
    hub.files = [*SMALL, INDEX, "a.safetensors", "b.safetensors", "model.safetensors", *UNREAD]
    find_model("org/demo")
    assert sorted(asked) == sorted([*SMALL, INDEX, "a.safetensors", "b.safetensors"])


def test_an_older_tokenizer_is_asked_for_where_there_is_no_newer(hub: Hub, asked) -> None:
    small = [name for name in SMALL if name != "tokenizer.json"]
    hub.files = [*small, "model.safetensors", *UNREAD]
    find_model("org/demo")
    older = ["tokenizer.model", "vocab.json", "merges.txt"]
    assert sorted(asked) == sorted([*small, *older, "model.safetensors"])


def test_weights_of_a_model_that_is_not_known_are_not_asked_for(hub: Hub, asked) -> None:
    hub.files = [*SMALL, "model.safetensors"]
    config = {"architectures": ["UnheardOfForCausalLM"], "model_type": "unheard_of"}
    (hub.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="UnheardOf"):
        find_model("org/demo")
    assert "model.safetensors" not in asked


def test_a_repository_in_another_format_is_refused(hub: Hub, asked) -> None:
    hub.files = [*SMALL, "model-q4.gguf", "pytorch_model.bin"]
    with pytest.raises(ValueError, match=r"lacks model\.safetensors: .* in safetensors files"):
        find_model("org/demo")
    hub.files = ["model-q4.gguf"]
    shutil.rmtree(hub.folder)
    hub.folder.mkdir()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        find_model("org/demo")


RESPONSE = SimpleNamespace(headers={}, request=None)
ERRORS = [
    RepositoryNotFoundError("404\n\nRepository Not Found", response=RESPONSE),
    HfHubHTTPError("503", response=RESPONSE),
    OSError(28, "No space left on device"),
    RuntimeError("a proxy that the network's library doesn't like"),
    TimeoutError(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_the_hub_raises_is_told_in_one_line(hub, monkeypatch, error: Exception) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match="the hub can't give a model of that name") as raised:
        find_model("org/demo")
    assert "\n" not in str(raised.value)
    assert raised.value.__cause__ is error


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)


NO_MODELS = {
    "model.gguf": "not there, and named like a file; nva reads folders",
    "org/model.gguf": "not there, and named like a file",
    "MODEL.GGUF": "not there, and named like a file",
    "weights/model.safetensors": "not there, and named like a file",
    "model.bin": "not there, and named like a file",
    "~/model": "there is no folder ~/model",
    "./model": "there is no folder",
    "a/b/c": "there is no folder",
    "/model": "there is no folder",
    "~nobody-of-that-name/model": "can't be looked at",
    "C:\\models\\demo": "there is no folder",
    "https://huggingface.co/org/demo": "there is no folder https://",
    "a" * 5000: "can't be looked at",
    "": "model is ''; give",
    b"model": "model is b'model'; give",
    5: "model is 5; give",
}


@pytest.mark.parametrize("name", NO_MODELS)
def test_what_can_be_no_hub_id_is_not_sent_there(no_hub, name) -> None:
    with pytest.raises(ValueError, match=NO_MODELS[name].replace("(", r"\(")):
        find_model(name)


def test_a_file_is_no_model(no_hub, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model.gguf", "demo", "with.dot"):
        Path(name).write_text("x")
        with pytest.raises(ValueError, match=f"{name} is no folder; nva reads folders"):
            find_model(name)
    Path("link").symlink_to("nowhere")
    with pytest.raises(ValueError, match="link is no folder"):
        find_model("link")


def test_folders_by_every_kind_of_name(no_hub, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("demo", "org/demo", "a b/模型", "v1.gguf", "org/demo@main", "x@y/z"):
        Path(name).mkdir(parents=True)
        assert find_model(name) == Path(name)
        assert find_model(Path(name)) == Path(name)
        assert find_model(f"~/{name}") == tmp_path / name
    Path("linked").symlink_to("org/demo")
    assert find_model("linked") == Path("linked")
    assert find_model(find_model("demo")) == Path("demo")

    class Pointer:
        def __fspath__(self) -> str:
            return "demo"

    class Bytes:
        def __fspath__(self) -> bytes:
            return os.fsencode("a b/模型")

    assert find_model(Pointer()) == Path("demo")
    assert find_model(Bytes()) == Path("a b/模型")


def test_a_variable_that_is_empty_is_not_set(no_hub, monkeypatch, demo_model) -> None:
    monkeypatch.setenv("NVA_MODEL", "")
    assert find_model(None) == demo_model
    monkeypatch.setenv("NVA_MODEL", str(demo_model.parent))
    assert find_model(None) == demo_model.parent


def test_a_bad_variable_is_blamed(no_hub, monkeypatch) -> None:
    monkeypatch.setenv("NVA_MODEL", "/no/such/folder")
    with pytest.raises(ValueError, match="NVA_MODEL is '/no/such/folder': there is no folder"):
        find_model(None)


def test_without_any_model_it_is_said_how_to_get_one(no_hub, monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("NVA_MODEL", raising=False)
    monkeypatch.setattr(find, "demo_folder", lambda: tmp_path / "demo")
    with pytest.raises(
        ValueError, match="no model named, and the demo model is not in .*make demo"
    ):
        find_model(None)


def test_a_place_that_can_not_be_looked_at_is_said(no_hub, monkeypatch) -> None:
    def refuse() -> Path:
        raise PermissionError("/tmp/nva-5 belongs to someone else")

    monkeypatch.delenv("NVA_MODEL", raising=False)
    monkeypatch.setattr(find, "cache_folder", refuse)
    with pytest.raises(ValueError, match="no model named, and no demo model .* someone else"):
        find_model(None)


def test_a_model_is_called_by_its_hub_id_or_its_folder(hub: Hub, tmp_path, monkeypatch) -> None:
    assert name_of(hub.folder) == "org/demo"
    assert name_of(tmp_path / "models--gpt2" / "snapshots" / COMMIT) == "gpt2"
    assert name_of(tmp_path / "Qwen3-0.6B") == "Qwen3-0.6B"
    assert name_of(tmp_path / "snapshots" / "demo") == "demo"
    monkeypatch.chdir(tmp_path)
    assert name_of(Path(".")) == name_of(Path("x/..").resolve()) == tmp_path.name
