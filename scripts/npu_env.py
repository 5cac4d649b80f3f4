"""Set up an environment in which the real torch_npu imports on a machine without an NPU, for the
tests in tests/npu.

    .venv/bin/python scripts/npu_env.py .venv-npu
    LD_LIBRARY_PATH=.venv-npu/cann .venv-npu/bin/python -m pytest tests/npu

The new environment sees all packages of the one that runs this script and adds torch_npu alone,
since a plain `import torch` fails wherever torch_npu is installed and CANN isn't. CANN's shared
libraries are replaced by stubs that answer every call with 0: schemas, shape inference, tracing and
conversion work, and nothing that needs a device does. The one law: what a stamp file vouches for
isn't done again. Needs gcc and binutils."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable

PACKAGES = (
    "torch_npu==2.13.0",
    "protobuf==6.33.1",
)  # torchair, inside torch_npu's wheel, reads graphs as protobuf
# symbols that Python, the C++ runtime or the linker bring
NOT_CANN = r"_?Py|_ZTH|__gmon_start__|_ITM_|__cxa_finalize"
SYSTEM_LIBS = r"(libc|libm|libgcc_s|libstdc\+\+|libpthread|libdl|librt)\.so|ld-linux"


def output(*command: str) -> str:
    """What a command prints. Raises CalledProcessError if it fails."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def symbols(libraries: Iterable[pathlib.Path], kinds: str) -> set[str]:
    """Names of the dynamic symbols of these kinds (nm's letters), versions cut off."""
    lines = [
        line.split()
        for library in libraries
        for line in output("nm", "-D", str(library)).splitlines()
    ]
    return {name.split("@")[0] for *_, kind, name in lines if kind in kinds}


def missing(wheel: pathlib.Path, torch_lib: pathlib.Path) -> tuple[set[str], set[str]]:
    """Libraries and symbols that torch_npu's libraries need and that neither it, nor torch, nor the
    system has."""
    wanting = sorted(wheel.rglob("*.so"))
    needed = {
        lib
        for path in wanting
        for lib in re.findall(r"NEEDED.*\[(.+?)\]", output("readelf", "-d", str(path)))
    }
    present = {path.name for path in [*wanting, *torch_lib.iterdir()]}
    libraries = {lib for lib in needed - present if not re.match(SYSTEM_LIBS, lib)}
    system = [
        pathlib.Path(path)
        for path in re.findall(r"=> (/\S+)", output("ldd", str(torch_lib / "libtorch_cpu.so")))
    ]
    provided = symbols([*wanting, *torch_lib.glob("*.so*"), *system], "ABCDGRSTVWiu")
    wanted = symbols(wanting, "Uw") - provided
    return libraries, {name for name in wanted if not re.match(NOT_CANN, name)}


def build_stubs(libraries: Iterable[str], names: Iterable[str], folder: pathlib.Path) -> None:
    """Write the libraries: the first defines every symbol as a function that returns 0, the others
    are empty."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        f'long stub_{i}(void) __asm__("{name}"); long stub_{i}(void) {{ return 0; }}'
        for i, name in enumerate(names)
    ]
    for i, library in enumerate(libraries):
        with tempfile.NamedTemporaryFile("w", suffix=".c") as code:
            code.write("\n".join(lines if i == 0 else ["extern int nothing;"]) + "\n")
            code.flush()
            output(
                "gcc",
                "-shared",
                "-fPIC",
                f"-Wl,-soname,{library}",
                "-o",
                str(folder / library),
                code.name,
            )


def make_environment(folder: pathlib.Path) -> None:
    """A virtual environment that adds PACKAGES to those of the running one."""
    output(sys.executable, "-m", "venv", "--without-pip", "--clear", str(folder))
    python = folder / "bin" / "python"
    packages = site_packages(folder)
    # addsitedir, unlike a bare path, also follows the other environment's own .pth files (an
    # editable install is one).
    (packages / "base.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, *PACKAGES], check=True)


def site_packages(folder: pathlib.Path) -> pathlib.Path:
    """Where an environment keeps its packages."""
    return pathlib.Path(
        sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    )


def make_stubs(folder: pathlib.Path) -> None:
    """Stubs for what this environment's torch_npu needs, in its folder `cann`."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, f"{sys.executable} has no torch"
    libraries, names = missing(
        site_packages(folder) / "torch_npu", pathlib.Path(spec.origin).parent / "lib"
    )
    build_stubs(sorted(libraries), sorted(names), folder / "cann")
    print(f"{folder / 'cann'}: {len(names)} symbols in {len(libraries)} libraries")


def once(stamp: pathlib.Path, content: str, action: Callable[[], None]) -> None:
    """Run the action unless the stamp file has this content; then write it."""
    if not stamp.exists() or stamp.read_text() != content:
        action()
        stamp.write_text(content)


def main(folder: pathlib.Path) -> None:
    """Bring the folder up to date."""
    versions = (
        f"{sys.version} {importlib.metadata.version('torch')} {sysconfig.get_path('purelib')}"
    )
    key = hashlib.sha256(pathlib.Path(__file__).read_bytes() + versions.encode()).hexdigest()
    once(folder / "installed", key, functools.partial(make_environment, folder))
    once(folder / "stubbed", key, functools.partial(make_stubs, folder))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).absolute())
