"""`nva doctor`: what is wrong with a machine, told before it costs a day.

The law: it looks and never changes anything; what it can't find out it says, and each problem comes
with what to do. It imports neither torch nor torch_npu itself, since a broken installation is what
it is for: a child process tries. Read next: kernels/npu/support.py for the graph modes;
docs/npu.md, Troubleshooting."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from nva.host.cache_folder import cache_folder
from nva.host.cores import cpu_quota, n_cores
from nva.kernels.host_memory import free_memory
from nva.kernels.npu.support import Installation, parse_version, refusals

Level = Literal["ok", "note", "problem"]

CANN_HOMES = (
    "/usr/local/Ascend/ascend-toolkit/latest",
    "/usr/local/Ascend/cann",
    "/usr/local/Ascend/latest",
)
DRIVER = Path("/usr/local/Ascend/driver/version.info")
FIRMWARE = Path("/usr/local/Ascend/firmware/version.info")
DEVICE_NODES = ("davinci_manager", "devmm_svm", "hisi_hdc")
SHM_BYTES = 8 << 30
SMALL_MEMORY = 2 << 30

# torch_npu release -> the CANN it is built for; Ascend/pytorch, COMPATIBILITY, 2026-08
NEWEST_CANN = {
    "2.12.0": (9, 1), "2.11.0": (9, 1), "2.10.0.post4": (9, 1), "2.9.0.post6": (9, 1),
    "2.7.1.post8": (9, 1),
    "2.9.0.post2": (9, 0), "2.8.0.post4": (9, 0), "2.7.1.post4": (9, 0),
    "2.9.0": (8, 5), "2.8.0.post2": (8, 5), "2.7.1.post2": (8, 5),
    "2.8.0": (8, 3), "2.7.1": (8, 3),
}  # fmt: skip

ADVICE = {  # variable: (values that are fine, what to do otherwise)
    "PYTORCH_NPU_ALLOC_CONF": (
        r".*expandable_segments:True.*",
        "set expandable_segments:True against fragmentation",
    ),
    "TASK_QUEUE_ENABLE": (
        r"[012]",
        "set 1 for graph=aclgraph (it allows no 2), 2 for eager and ge",
    ),
    "ASCEND_LAUNCH_BLOCKING": (
        r"0|",
        "unset it: with 1, ACL graphs can't be captured and all else is slow",
    ),
    "HCCL_OP_EXPANSION_MODE": (
        r"|AI_CPU|HOST",
        "unset it unless measured: AIV has been reported to hang",
    ),
    "OMP_NUM_THREADS": (
        r"[1-9]|1[0-6]",
        "set a small number: the host's threads compete with the one that launches",
    ),
}


@attrs.frozen(kw_only=True)
class Finding:
    """One thing that was looked at. `advice` is empty unless something should be done."""

    level: Level
    subject: str
    found: str
    advice: str = ""


@attrs.frozen(kw_only=True)
class Machine:
    """Where to look; tests look elsewhere."""

    root: Path = Path("/")
    environment: Mapping[str, str] = attrs.field(factory=lambda: dict(os.environ))
    python: str = sys.executable

    def read(self, path: str | Path) -> str | None:
        """A text file's content, None if there is none to read."""
        try:
            return (self.root / str(path).lstrip("/")).read_text(errors="replace")
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        return (self.root / path.lstrip("/")).exists()


def diagnose(machine: Machine | None = None) -> list[Finding]:
    """All findings, in order of what depends on what."""
    machine = machine or Machine()
    torch = probe_torch(machine)
    cards = sorted(card.name for card in (machine.root / "dev").glob("davinci[0-9]*"))
    found = [*about_python(torch), *about_packages(), *about_processor(machine, torch)]
    found += [*about_memory(machine), *about_kernels(machine)]
    if not cards and torch.get("torch_npu") is None:
        gpus = ", ".join(torch.get("gpus", ()))
        other = f"GPU: {gpus}" if gpus else "CPU path only"
        return [*found, Finding(level="note", subject="NPU", found=f"none: {other}")]
    cann = find_cann(machine)
    return [
        *found,
        *about_devices(machine, cards),
        *about_cann(torch, cann),
        *about_driver(machine),
        *about_modes(torch, cann),
        *about_environment(machine),
        *about_speed(torch),
    ]


def is_healthy(findings: list[Finding]) -> bool:
    """Whether nothing needs to be done."""
    return all(finding.level != "problem" for finding in findings)


PROBE = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import torch
found = {"torch": torch.__version__, "n_devices": 0, "n_threads": torch.get_num_threads()}
found["instructions"] = torch.backends.cpu.get_cpu_capability()
if torch.cuda.is_available():
    found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
try:
    import torch_npu
    found["torch_npu"] = torch_npu.__version__
    found["has_attention"] = hasattr(torch.ops.npu, "npu_fused_infer_attention_score_v2")
    found["n_devices"] = torch.npu.device_count()
except ImportError as error:
    found["import_error"] = str(error)
if found["n_devices"]:
    found["device"] = torch.npu.get_device_name(0)
    found["memory"] = torch.npu.mem_get_info(0)
    def seconds(work, n=20):
        work(); torch.npu.synchronize(); start = time.perf_counter()
        for _ in range(n): work()
        torch.npu.synchronize(); return (time.perf_counter() - start) / n
    x = torch.randn(8192, 8192, dtype=torch.bfloat16, device="npu")
    y = torch.empty(2**28, dtype=torch.bfloat16, device="npu"); z = torch.empty_like(y)
    found["matmul_tflops"] = 2 * 8192**3 / seconds(lambda: x @ x) / 1e12
    found["copy_gb_per_s"] = 2 * y.numel() * 2 / seconds(lambda: z.copy_(y)) / 1e9
print("nva:" + json.dumps(found))
"""
"""What a child process finds out: an import that crashes can then be told from one that fails."""


def probe_torch(machine: Machine) -> dict[str, Any]:
    """What a child process finds out about torch and torch_npu; {"error": ...} if it doesn't get
    that far."""
    command = [machine.python, "-c", PROBE]
    environment = dict(machine.environment)
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"error": "importing torch and touching the device took more than two minutes"}
    line = next((line for line in child.stdout.splitlines() if line.startswith("nva:")), None)
    if line is None:
        errors = [line for line in child.stderr.splitlines() if re.match(r"\w*Error", line)]
        return {
            "error": errors[0]
            if errors
            else f"importing torch ended with exit code {child.returncode}"
        }
    return json.loads(line.removeprefix("nva:"))


def about_python(torch: Mapping[str, Any]) -> Iterator[Finding]:
    """Python, torch and torch_npu: versions, and whether they load."""
    yield Finding(level="ok", subject="Python", found=".".join(map(str, sys.version_info[:3])))
    if "error" in torch:
        advice = (
            "where torch_npu is installed and CANN is not, torch fails to load: source CANN's "
            "set_env.sh, or uninstall "
            "torch_npu, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to use the CPU"
        )
        yield Finding(level="problem", subject="torch", found=torch["error"], advice=advice)
        return
    yield Finding(level="ok", subject="torch", found=torch["torch"])
    npu = torch.get("torch_npu")
    if npu is not None:
        same = parse_version(npu) == parse_version(torch["torch"])
        advice = "" if same else f"torch_npu {npu} needs torch {'.'.join(npu.split('.')[:3])}"
        yield Finding(
            level="ok" if same else "problem", subject="torch_npu", found=npu, advice=advice
        )


PACKAGES = ("transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy")
EXTRAS = {"pillow": "nva[vision], for images"}


def about_packages() -> Iterator[Finding]:
    """What else is installed that nva uses, by version."""
    found = {name: _version(name) for name in (*PACKAGES, *EXTRAS)}
    missing = [name for name in PACKAGES if found[name] is None]
    yield Finding(
        level="problem" if missing else "ok",
        subject="packages",
        found=", ".join(f"{name} {version}" for name, version in found.items() if version),
        advice=f"install {', '.join(missing)}" if missing else "",
    )
    for name, extra in EXTRAS.items():
        if found[name] is None:
            advice = f"if you need it: pip install '{extra.partition(',')[0]}'"
            yield Finding(level="note", subject=name, found=f"missing ({extra})", advice=advice)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def about_processor(machine: Machine, torch: Mapping[str, Any]) -> Iterator[Finding]:
    """The processor, what it can do, and how many threads compute on it."""
    lines = (machine.read("/proc/cpuinfo") or "").splitlines()
    model = next((line for line in lines if line.startswith("model name")), "")
    name = model.partition(":")[2].strip() or platform.machine()
    can = torch.get("instructions", "unknown instructions")
    yield Finding(level="ok", subject="processor", found=f"{name} ({can})")

    n, quota = n_cores(machine.root), cpu_quota(machine.root)
    found = f"{n} cores of {os.cpu_count()}" + (f", by a limit of {quota}" if quota == n else "")
    asked = machine.environment.get("OMP_NUM_THREADS")
    found += f"; OMP_NUM_THREADS={asked}" if asked else ""
    n_threads = torch.get("n_threads", n)
    advice = f"{n_threads} threads on {n} cores wait for each other: set OMP_NUM_THREADS={n}"
    is_crowded = n_threads > n
    yield Finding(
        level="note" if is_crowded else "ok",
        subject="threads",
        found=f"{n_threads} threads on {found}",
        advice=advice if is_crowded else "",
    )


def about_memory(machine: Machine) -> Iterator[Finding]:
    """What weights and caches can still take."""
    try:
        free = free_memory(machine.root)
    except ValueError as error:
        yield Finding(level="note", subject="memory", found="unknown", advice=str(error))
        return
    is_small = free < SMALL_MEMORY
    yield Finding(
        level="note" if is_small else "ok",
        subject="memory",
        found=f"{free / 2**30:.1f} GiB free, a container's limit counted",
        advice="a small model and its cache want a few GiB" if is_small else "",
    )


def about_kernels(machine: Machine) -> Iterator[Finding]:
    """Whether the CPU's kernels can be compiled, and kept."""
    asked = machine.environment.get("CXX")
    names = (asked,) if asked else ("g++", "c++", "clang++")
    path = machine.environment.get("PATH")
    compiler = next((found for name in names if (found := shutil.which(name, path=path))), None)
    yield Finding(
        level="ok" if compiler else "note",
        subject="compiler",
        found=compiler or (f"CXX is {asked}, which is not found" if asked else "none"),
        advice=""
        if compiler
        else "install g++: without compiled kernels a CPU is several times slower",
    )
    try:
        folder = cache_folder() / "kernels"
    except OSError as error:
        folder, problem = Path("none"), str(error)
    else:
        problem = _cannot_keep(folder)
    n_kept = len([*folder.glob("cpu-*.so")])
    yield Finding(
        level="note" if problem else "ok",
        subject="kernel cache",
        found=f"{folder} ({problem or f'{n_kept} kept there'})",
        advice="set XDG_CACHE_HOME to a folder that can be written and run from" if problem else "",
    )


def _cannot_keep(folder: Path) -> str:
    """Why a library can't be kept in a folder, or to be made there; empty if it can."""
    there = next(each for each in (folder, *folder.parents) if os.path.exists(each))
    if not os.access(there, os.W_OK | os.X_OK):
        return "not writable"
    is_noexec = hasattr(os, "statvfs") and os.statvfs(there).f_flag & getattr(os, "ST_NOEXEC", 0)
    return "mounted noexec" if is_noexec else ""


def about_devices(machine: Machine, cards: list[str]) -> Iterator[Finding]:
    """Device nodes, shared memory, and npu-smi: what a container often lacks."""
    if not cards:
        advice = (
            "pass them to the container: --device /dev/davinci0 --device /dev/davinci_manager ..."
        )
        yield Finding(level="problem", subject="devices", found="no /dev/davinci*", advice=advice)
    else:
        yield Finding(level="ok", subject="devices", found=", ".join(cards))
    missing = [f"/dev/{node}" for node in DEVICE_NODES if not machine.exists(f"/dev/{node}")]
    if cards and missing:
        advice = "pass these to the container too: --device " + " --device ".join(missing)
        yield Finding(
            level="problem",
            subject="device nodes",
            found=f"missing {', '.join(missing)}",
            advice=advice,
        )
    if machine.exists("/dev/shm"):
        size = shutil.disk_usage(machine.root / "dev/shm").total
        advice = "" if size >= SHM_BYTES else "give the container more: --shm-size=16g"
        level: Level = "problem" if advice else "ok"
        yield Finding(
            level=level, subject="/dev/shm", found=f"{size / 2**30:.1f} GiB", advice=advice
        )
    smi = machine.exists("/usr/local/bin/npu-smi") or machine.exists("/usr/local/sbin/npu-smi")
    advice = (
        ""
        if smi
        else "mount /usr/local/bin/npu-smi and /usr/local/Ascend/driver into the container"
    )
    yield Finding(
        level="ok" if smi else "note",
        subject="npu-smi",
        found="there" if smi else "missing",
        advice=advice,
    )


def find_cann(machine: Machine) -> str | None:
    """The version of CANN, from the files of its installation."""
    homes = [machine.environment.get("ASCEND_HOME_PATH"), *CANN_HOMES]
    for home in filter(None, homes):
        folder = machine.root / home.lstrip("/")
        files = [
            *folder.glob("*/ascend_toolkit_install.info"),
            *folder.glob("version.cfg"),
            *folder.glob("*/version.info"),
        ]
        for path in files:
            match = re.search(
                r"[Vv]ersion\s*=\s*\[?[^\d\n]*(\d+\.\d+[\w.]*)", path.read_text(errors="replace")
            )
            if match:
                return match[1]
    return None


def about_cann(torch: Mapping[str, Any], cann: str | None) -> Iterator[Finding]:
    """CANN, against what this torch_npu was built for."""
    if cann is None:
        advice = "install the CANN toolkit and kernels, and source its set_env.sh"
        yield Finding(level="problem", subject="CANN", found="not found", advice=advice)
        return
    wanted = NEWEST_CANN.get(torch.get("torch_npu") or "")
    if wanted is None or parse_version(cann) == wanted:
        yield Finding(level="ok", subject="CANN", found=cann)
    else:
        text = ".".join(map(str, wanted))
        advice = (
            f"torch_npu {torch['torch_npu']} was built for CANN {text}: install that, or the "
            "torch_npu of your CANN"
        )
        yield Finding(level="problem", subject="CANN", found=cann, advice=advice)


def about_driver(machine: Machine) -> Iterator[Finding]:
    """Driver and firmware of the host."""
    for subject, path in (("driver", DRIVER), ("firmware", FIRMWARE)):
        match = re.search(r"[Vv]ersion\s*=\s*(\S+)", machine.read(path) or "")
        advice = "" if match else f"{path} isn't readable; in a container, mount it from the host"
        found = match[1] if match else "unknown"
        if subject == "driver" and match and (parse_version(found) or (99, 0)) < (25, 5):
            advice = (
                "ACL graphs of many shapes exhaust the streams of drivers before 25.5; update it, "
                "or graph='eager'"
            )
        yield Finding(level="note" if advice else "ok", subject=subject, found=found, advice=advice)


@attrs.frozen(kw_only=True)
class _Example:
    """Heads of a usual model: grouped queries, heads of 128, no window."""

    n_heads: int = 32
    n_kv_heads: int = 8
    head_dim: int = 128
    windows: tuple[int | None, ...] = (None,)
    vision: None = None


def about_modes(torch: Mapping[str, Any], cann: str | None) -> Iterator[Finding]:
    """Which graph modes work for a usual model, and why the others don't."""
    inside = (
        Path(importlib.util.find_spec("torch_npu").origin).parent / "dynamo"
        if torch.get("torch_npu")
        else Path()
    )
    installation = Installation(
        cann=parse_version(cann),
        has_attention=torch.get("has_attention", False),
        has_torchair=(inside / "torchair").is_dir(),
        has_npugraph_ex=(inside / "npugraph_ex").is_dir(),
    )
    for mode, reason in refusals(installation, _Example()).items():
        found = (
            f"won't work: {reason}"
            if reason
            else "works for grouped queries with heads of 128, as far as is known"
        )
        yield Finding(level="note" if reason else "ok", subject=f"graph={mode}", found=found)


def about_environment(machine: Machine) -> Iterator[Finding]:
    """Environment variables that matter."""
    for name, (fine, advice) in ADVICE.items():
        value = machine.environment.get(name, "")
        good = re.fullmatch(fine, value) is not None
        yield Finding(
            level="ok" if good else "note",
            subject=name,
            found=value or "unset",
            advice="" if good else advice,
        )


def about_speed(torch: Mapping[str, Any]) -> Iterator[Finding]:
    """Matrix product and memory bandwidth, where a device was there to measure them."""
    if torch.get("n_devices"):
        found = (
            f"{torch['device']}: {torch['matmul_tflops']:.0f} TFLOP/s in bfloat16, "
            f"{torch['copy_gb_per_s']:.0f} GB/s"
        )
        slow = torch["matmul_tflops"] < 100 or torch["copy_gb_per_s"] < 500
        advice = (
            "a 910B gives more than twice that: look for other jobs with npu-smi, and at power and "
            "temperature"
        )
        yield Finding(
            level="note" if slow else "ok",
            subject="speed",
            found=found,
            advice=advice if slow else "",
        )


def report(findings: list[Finding]) -> str:
    """The findings as lines of text, the advice below each."""
    width = max(len(finding.subject) for finding in findings)
    signs = {"ok": " ok ", "note": "note", "problem": "FAIL"}
    lines = []
    for finding in findings:
        lines.append(f"{signs[finding.level]}  {finding.subject:{width}}  {finding.found}")
        lines += [f"{'':{width + 8}}-> {finding.advice}"] if finding.advice else []
    return "\n".join(
        [
            *lines,
            "",
            "healthy" if is_healthy(findings) else "not healthy: see the lines marked FAIL",
        ]
    )


def main(as_json: bool = False) -> int:
    """Print the diagnosis; the exit code is 0 if nothing needs to be done, else 1."""
    findings = diagnose()
    if as_json:
        print(
            json.dumps(
                {"healthy": is_healthy(findings), "findings": [attrs.asdict(f) for f in findings]},
                indent=2,
            )
        )
    else:
        print(report(findings))
    return 0 if is_healthy(findings) else 1
