"""The doctor's findings on machines that are a folder of files and an answer of the child
process."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from nva.cli import doctor
from nva.cli import main as cli
from nva.cli.doctor import Machine, diagnose, is_healthy

NPU = {
    "torch": "2.9.0",
    "torch_npu": "2.9.0",
    "has_attention": True,
    "n_devices": 1,
    "device": "Ascend910B3",
    "matmul_tflops": 280.0,
    "copy_gb_per_s": 1300.0,
}
FILES = {
    "dev/davinci0": "",
    "dev/davinci_manager": "",
    "dev/devmm_svm": "",
    "dev/hisi_hdc": "",
    "usr/local/bin/npu-smi": "",
    "usr/local/Ascend/driver/version.info": "Version=25.5.1\n",
    "usr/local/Ascend/firmware/version.info": "Version=7.8.0.2\n",
    "usr/local/Ascend/ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info": "version=8.5.0\n",
}
TUNED = {
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    "TASK_QUEUE_ENABLE": "1",
    "OMP_NUM_THREADS": "4",
}


@pytest.fixture
def diagnosed(tmp_path, monkeypatch):
    """A function from what a machine has to the findings, by subject."""

    def diagnosed(torch=NPU, without=(), environment=TUNED, **changed):
        for path, text in {**FILES, **changed}.items():
            if not path.startswith(tuple(without)):
                (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / path).write_text(text)
        monkeypatch.setattr(doctor, "probe_torch", lambda _: torch)
        monkeypatch.setattr(
            doctor, "about_modes", lambda *_: []
        )  # looks at this process's own torch_npu
        found = diagnose(Machine(root=tmp_path, environment=environment))
        return {finding.subject: finding for finding in found}

    return diagnosed


def test_a_good_machine_is_healthy(diagnosed):
    found = diagnosed()
    assert {finding.level for finding in found.values()} == {"ok"}, found
    assert found["CANN"].found == "8.5.0"
    assert "280 TFLOP/s" in found["speed"].found


def test_a_laptop_is_healthy_and_told_so(diagnosed):
    found = diagnosed({"torch": "2.9.0", "n_devices": 0}, without=("dev", "usr"))
    assert found["NPU"].found == "none: CPU path only"
    assert is_healthy(list(found.values()))


LAPTOP = {"torch": "2.9.0", "n_devices": 0, "n_threads": 2, "instructions": "AVX512"}


@pytest.fixture
def laptop(tmp_path, monkeypatch):
    """A function to the findings on a machine with a CPU alone, by subject."""
    monkeypatch.setattr(doctor, "n_cores", lambda root: 2)
    monkeypatch.setattr(doctor, "cpu_quota", lambda root: None)
    monkeypatch.setattr(doctor, "cache_folder", lambda: tmp_path / "cache")

    def laptop(torch=LAPTOP, **environment):
        monkeypatch.setattr(doctor, "probe_torch", lambda _: torch)
        meminfo = "MemTotal: 9999999 kB\nMemAvailable: 8388608 kB\n"
        files = {"proc/meminfo": meminfo, "proc/cpuinfo": "model name\t: Some CPU\n"}
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            if not (tmp_path / path).exists():
                (tmp_path / path).write_text(text)
        found = diagnose(Machine(root=tmp_path, environment={"PATH": "/usr/bin", **environment}))
        return {finding.subject: finding for finding in found}

    return laptop


def test_a_laptop_is_described(laptop, tmp_path):
    found = laptop()
    assert is_healthy(list(found.values()))
    assert found["processor"].found == "Some CPU (AVX512)"
    assert found["threads"].found.startswith("2 threads on 2 cores")
    assert found["memory"].found == "8.0 GiB free, a container's limit counted"
    assert found["kernel cache"].found == f"{tmp_path / 'cache/kernels'} (0 kept there)"
    assert f"numpy {np.__version__}" in found["packages"].found
    assert (
        "transformers 5" in found["packages"].found or "transformers 4" in found["packages"].found
    )
    assert laptop({**LAPTOP, "gpus": ["H200"]})["NPU"].found == "none: GPU: H200"


def test_a_laptop_without_a_compiler_is_told_what_it_costs(laptop, tmp_path):
    found = laptop(PATH=str(tmp_path))["compiler"]
    assert (found.level, found.found) == ("note", "none")
    assert "install g++" in found.advice
    found = laptop(CXX="no-such-compiler")["compiler"]
    assert (found.level, found.found) == ("note", "CXX is no-such-compiler, which is not found")
    assert laptop(CXX="cat")["compiler"].found == "/usr/bin/cat"


def test_more_threads_than_cores_are_noted(laptop):
    found = laptop({**LAPTOP, "n_threads": 16}, OMP_NUM_THREADS="16")["threads"]
    assert found.level == "note"
    assert "OMP_NUM_THREADS=16" in found.found
    assert "set OMP_NUM_THREADS=2" in found.advice
    assert laptop(OMP_NUM_THREADS="1")["threads"].level == "ok"


def test_a_quota_is_named(laptop, monkeypatch):
    monkeypatch.setattr(doctor, "cpu_quota", lambda root: 2)
    assert "by a limit of 2" in laptop()["threads"].found


def test_little_memory_is_noted(laptop, tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 1048576 kB\n")
    found = laptop()["memory"]
    assert (found.level, found.found.split()[0]) == ("note", "1.0")


def test_memory_that_is_not_told_is_noted(laptop, monkeypatch):
    def unknown(_):
        raise ValueError("this system doesn't tell; give cache_memory or n_blocks")

    monkeypatch.setattr(doctor, "free_memory", unknown)
    found = laptop()["memory"]
    assert (found.level, found.found) == ("note", "unknown")
    assert "give cache_memory" in found.advice


def test_a_cache_that_keeps_nothing_is_noted(laptop, tmp_path, monkeypatch):
    (tmp_path / "cache/kernels").mkdir(parents=True)
    (tmp_path / "cache/kernels/cpu-1.so").touch()
    assert "1 kept there" in laptop()["kernel cache"].found
    with monkeypatch.context() as patch:
        patch.setattr(doctor.os, "access", lambda *_: False)
        found = laptop()["kernel cache"]
    assert found.level == "note"
    assert "not writable" in found.found
    assert "XDG_CACHE_HOME" in found.advice
    with monkeypatch.context() as patch:
        flags = type("flags", (), {"f_flag": doctor.os.ST_NOEXEC})
        patch.setattr(doctor.os, "statvfs", lambda _: flags)
        assert "mounted noexec" in laptop()["kernel cache"].found

    def refuse():
        raise PermissionError("/tmp/nva-5 belongs to someone else")

    monkeypatch.setattr(doctor, "cache_folder", refuse)
    assert "belongs to someone else" in laptop()["kernel cache"].found


def test_a_package_that_is_missing_is_a_problem_and_an_extra_a_note(laptop, monkeypatch):
    version = doctor.importlib.metadata.version

    def without(name):
        if name in ("safetensors", "pillow"):
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", without)
    found = laptop()
    assert (found["packages"].level, found["packages"].advice) == ("problem", "install safetensors")
    assert (found["pillow"].level, found["pillow"].advice) == (
        "note",
        "if you need it: pip install 'nva[vision]'",
    )


def test_the_probe_finds_out_what_this_machine_has():
    """In a process of its own; this one may have torch or not."""
    found = doctor.probe_torch(Machine())
    assert "error" not in found
    assert found["n_threads"] >= 1
    assert found["instructions"]


TOOLKIT = "usr/local/Ascend/ascend-toolkit"
FAULTS = {
    "no device nodes": ({"without": ("dev/davinci0",)}, "devices", "--device /dev/davinci0"),
    "a node too few": ({"without": ("dev/hisi_hdc",)}, "device nodes", "--device /dev/hisi_hdc"),
    "no CANN": ({"without": (TOOLKIT,)}, "CANN", "set_env.sh"),
    "another CANN": ({f"{TOOLKIT}/latest/version.cfg": "runtime_running_version=[8.2.RC1:8.2.RC1]\n",
                      "without": (f"{TOOLKIT}/latest/aarch64",)}, "CANN", "built for CANN 8.5"),
    "torch of another version": ({"torch": {**NPU, "torch": "2.8.0"}}, "torch_npu", "needs torch 2.9.0"),
    "torch that doesn't load": ({"torch": {"error": "ImportError: libhccl.so: cannot open"}}, "torch", "set_env.sh"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "subject", "advice"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found_and_told_what_to_do(diagnosed, changes, subject, advice):
    found = diagnosed(**changes)
    assert found[subject].level == "problem"
    assert advice in found[subject].advice
    assert not is_healthy(list(found.values()))


@pytest.mark.parametrize(
    ("changes", "subject", "advice"),
    [
        ({"environment": {}}, "PYTORCH_NPU_ALLOC_CONF", "expandable_segments"),
        ({"environment": {"ASCEND_LAUNCH_BLOCKING": "1"}}, "ASCEND_LAUNCH_BLOCKING", "unset it"),
        ({"environment": {"HCCL_OP_EXPANSION_MODE": "AIV"}}, "HCCL_OP_EXPANSION_MODE", "hang"),
        ({"usr/local/Ascend/driver/version.info": "Version=24.1.0\n"}, "driver", "graph='eager'"),
        ({"without": ("usr/local/bin",)}, "npu-smi", "mount"),
        ({"torch": {**NPU, "copy_gb_per_s": 90.0}}, "speed", "other jobs"),
    ],
)
def test_a_note_leaves_the_machine_healthy(diagnosed, changes, subject, advice):
    found = diagnosed(**changes)
    assert found[subject].level == "note"
    assert advice in found[subject].advice
    assert is_healthy(list(found.values()))


def test_small_shared_memory_is_a_problem(diagnosed, tmp_path, monkeypatch):
    (tmp_path / "dev/shm").mkdir(parents=True)
    monkeypatch.setattr(
        doctor.shutil, "disk_usage", lambda _: type("usage", (), {"total": 64 << 20})
    )
    assert "--shm-size" in diagnosed()["/dev/shm"].advice


def test_every_torch_npu_has_its_own_graph_modes():
    modes = {finding.subject: finding for finding in doctor.about_modes({}, "8.3.0")}
    assert set(modes) == {"graph=eager", "graph=ge", "graph=aclgraph"}
    assert {finding.level for finding in modes.values()} == {"note"}


@pytest.mark.parametrize(
    "script", ["raise ImportError('libhccl.so: cannot open')", "import os; os._exit(139)"]
)
def test_a_child_that_fails_or_crashes_is_reported(tmp_path, script, monkeypatch):
    monkeypatch.setattr(doctor, "PROBE", script)
    found = doctor.probe_torch(Machine(root=tmp_path, python=sys.executable))
    assert "libhccl" in found["error"] or "exit code 139" in found["error"]


def test_the_command_says_healthy_or_not(capsys, monkeypatch):
    """On this machine, whatever it is, text and JSON and exit code agree."""
    codes = cli.main(["doctor"]), cli.main(["doctor", "--json"])
    text, _, data = capsys.readouterr().out.partition("{")
    healthy = json.loads("{" + data)["healthy"]
    assert codes == (0, 0) if healthy else (1, 1)
    assert ("not healthy" in text) == (not healthy)
