"""The doctor's findings on machines that are a folder of files and an answer of the child
process."""

from __future__ import annotations

import json
import sys

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
