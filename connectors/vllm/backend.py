"""Builds the wheel (PEP 517). Needs a C compiler, Python's headers and a build folder of kvd, and no network.

The folder is $KVD_BUILD, else build/release of the source tree this file lies in; without one an installed libkvx is asked for (pkg-config kvx).
"""

from __future__ import annotations

import base64
import hashlib
import os
import runpy
import subprocess
import sysconfig
import tempfile
import tomllib
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ARCHIVES = ["connectors/libkvx_static.a", "kernels/libkv_kernels.a", "common/libkv_common.a"]
COMPILER = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()
FLAGS = "-std=gnu17 -O2 -fPIC -shared -fvisibility=hidden -Wall -Wextra -Wpedantic -Wconversion -Wstrict-prototypes -Werror -D_GNU_SOURCE -DPy_LIMITED_API=0x030b0000".split()
NOTHING = (
    "kvd-vllm: no build of kvd found. Run `cmake --preset release && cmake --build --preset release` in the source tree, "
    "or name a build folder in KVD_BUILD, or install kvd so that `pkg-config kvx` knows it."
)


def _static_or_shared(name: str) -> str:
    """The archive of a small library where the system has one, so that the module needs nothing at run time."""
    found = subprocess.run([*COMPILER, f"-print-file-name=lib{name}.a"], capture_output=True, text=True, check=True).stdout.strip()
    return found if os.path.isabs(found) else f"-l{name}"


def _from_build() -> list[str]:
    """What the compiler is told of a build folder; empty: there is none."""
    named = os.environ.get("KVD_BUILD")
    build = Path(named) if named else ROOT / "build" / "release"
    archives = [build / archive for archive in ARCHIVES]
    if not all(archive.exists() for archive in archives):
        if named:
            raise SystemExit(f"kvd-vllm: KVD_BUILD={named} has no {' '.join(ARCHIVES)}; build the target kvx_static there")
        return []
    include = [f"-I{ROOT / folder / 'include'}" for folder in ("connectors", "client", "kernels", "common")]
    return [*include, *map(str, archives), "-Wl,--exclude-libs,ALL", *map(_static_or_shared, ("xxhash", "crypto")), "-Wl,--as-needed", "-ldl", "-lpthread"]


def _from_pkg_config() -> list[str]:
    try:
        flags = subprocess.run(["pkg-config", "--cflags", "--libs", "kvx"], capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        raise SystemExit(NOTHING) from None
    return [*flags, *(f"-Wl,-rpath,{flag[2:]}" for flag in flags if flag.startswith("-L"))]


def _build_module() -> bytes:
    kvd = _from_build() or _from_pkg_config()
    sources = sorted(map(str, (HERE / "src").glob("*.c")))
    with tempfile.TemporaryDirectory() as folder:
        module = Path(folder) / "_kvd.abi3.so"
        subprocess.run([*COMPILER, *FLAGS, "-isystem", sysconfig.get_path("include"), "-o", str(module), *sources, *kvd], check=True)
        return module.read_bytes()


def build_wheel(wheel_directory: str, config_settings: dict | None = None, metadata_directory: str | None = None) -> str:
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    version = runpy.run_path(str(HERE / "kvd_vllm" / "__init__.py"))["__version__"]
    stem = f"{project['name'].replace('-', '_')}-{version}"
    tag = "cp311-abi3-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
    files = {f"kvd_vllm/{source.name}": source.read_bytes() for source in sorted((HERE / "kvd_vllm").glob("*.py"))}
    files["kvd_vllm/_kvd.abi3.so"] = _build_module()
    points = "".join(f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in names.items()) for group, names in project["entry-points"].items())
    for name, text in {
        "METADATA": f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\nSummary: {project['description']}\nRequires-Python: {project['requires-python']}\n",
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: kvd-vllm\nRoot-Is-Purelib: false\nTag: {tag}\n",
        "entry_points.txt": points,
    }.items():
        files[f"{stem}.dist-info/{name}"] = text.encode()
    record = f"{stem}.dist-info/RECORD"
    digests = {name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode() for name, data in files.items()}
    files[record] = ("".join(f"{name},sha256={digests[name]},{len(data)}\n" for name, data in files.items()) + f"{record},,\n").encode()

    path = Path(wheel_directory) / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in files.items():
            wheel.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
    return path.name
