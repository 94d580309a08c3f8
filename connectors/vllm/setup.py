"""Builds kvd_vllm._kvd from a build folder of kvd. Needs a C compiler and no network.

The folder is $KVD_BUILD, else build/release of the source tree this file lies in; without one an installed libkvx is asked for (pkg-config kvx).
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ARCHIVES = ["connectors/libkvx_static.a", "kernels/libkv_kernels.a", "common/libkv_common.a"]
FLAGS = ["-std=gnu17", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wstrict-prototypes", "-Werror"]
NOTHING = (
    "kvd-vllm: no build of kvd found. Run `cmake --preset release && cmake --build --preset release` in the source tree, "
    "or name a build folder in KVD_BUILD, or install kvd so that `pkg-config kvx` knows it."
)


def static_or_shared(name: str) -> list[str]:
    """The archive of a small library where the system has one, so that the module needs nothing at run time."""
    compiler = sysconfig.get_config_var("CC") or "cc"
    try:
        found = subprocess.run([*compiler.split(), f"-print-file-name=lib{name}.a"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        found = ""
    return [found] if os.path.isabs(found) else [f"-l{name}"]


def from_build() -> dict | None:
    named = os.environ.get("KVD_BUILD")
    build = Path(named) if named else ROOT / "build" / "release"
    archives = [build / archive for archive in ARCHIVES]
    if not all(archive.exists() for archive in archives):
        if named:
            raise SystemExit(f"kvd-vllm: KVD_BUILD={named} has no {' '.join(ARCHIVES)}; build the target kvx_static there")
        return None
    objects = [str(archive) for archive in archives]
    return {
        "include_dirs": [str(ROOT / folder) for folder in ("connectors/include", "client/include", "kernels/include", "common/include")],
        "extra_objects": objects,
        "depends": objects,
        "extra_link_args": ["-Wl,--exclude-libs,ALL", *static_or_shared("xxhash"), *static_or_shared("crypto"), "-Wl,--as-needed", "-ldl", "-lpthread"],
    }


def from_pkg_config() -> dict | None:
    try:
        flags = subprocess.run(["pkg-config", "--cflags", "--libs", "kvx"], capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return None
    return {
        "include_dirs": [flag[2:] for flag in flags if flag.startswith("-I")],
        "extra_link_args": [flag for flag in flags if not flag.startswith("-I")] + [f"-Wl,-rpath,{flag[2:]}" for flag in flags if flag.startswith("-L")],
    }


def extension() -> Extension:
    where = from_build() or from_pkg_config()
    if where is None:
        raise SystemExit(NOTHING)
    return Extension(
        "kvd_vllm._kvd",
        sorted(f"src/{source.name}" for source in (HERE / "src").glob("*.c")),
        py_limited_api=True,
        extra_compile_args=[*FLAGS, "-isystem", sysconfig.get_path("include")],
        **{
            **where,
            "depends": [*where.get("depends", []), "src/kvdpy.h"],
            "define_macros": [("Py_LIMITED_API", "0x030b0000"), ("_GNU_SOURCE", None)],
        },
    )


os.chdir(HERE)
setup(ext_modules=[extension()], packages=["kvd_vllm"])
