"""Builds the wheel (PEP 517) with setuptools alone: older ones need the package `wheel` for it, which a bare engine environment does not have."""

from __future__ import annotations

import base64
import hashlib
import runpy
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def _project() -> dict:
    version = runpy.run_path(str(HERE / "kvd_vllm" / "__init__.py"))["__version__"]
    return tomllib.loads((HERE / "pyproject.toml").read_text())["project"] | {"version": version}


def _tag() -> str:
    return "cp311-abi3-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")


def _metadata(project: dict) -> dict[str, str]:
    points = "".join(f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in names.items()) for group, names in project["entry-points"].items())
    return {
        "METADATA": f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\nSummary: {project['description']}\nRequires-Python: {project['requires-python']}\n",
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: kvd-vllm\nRoot-Is-Purelib: false\nTag: {_tag()}\n",
        "entry_points.txt": points,
    }


def _module(folder: str) -> Path:
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--build-lib", folder, "--build-temp", folder + "/objects"], cwd=HERE, check=True)
    return next(Path(folder).glob("kvd_vllm/_kvd*.so"))


def build_wheel(wheel_directory: str, config_settings: dict | None = None, metadata_directory: str | None = None) -> str:
    project = _project()
    stem = f"{project['name'].replace('-', '_')}-{project['version']}"
    record: list[str] = []

    def add(wheel: zipfile.ZipFile, name: str, data: bytes) -> None:
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(data)}")
        wheel.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)

    path = Path(wheel_directory) / f"{stem}-{_tag()}.whl"
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path, "w") as wheel:
        for source in sorted((HERE / "kvd_vllm").glob("*.py")):
            add(wheel, f"kvd_vllm/{source.name}", source.read_bytes())
        add(wheel, "kvd_vllm/_kvd.abi3.so", _module(folder).read_bytes())
        for name, text in _metadata(project).items():
            add(wheel, f"{stem}.dist-info/{name}", text.encode())
        record.append(f"{stem}.dist-info/RECORD,,")
        wheel.writestr(f"{stem}.dist-info/RECORD", "\n".join(record) + "\n")
    return path.name


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    return []
