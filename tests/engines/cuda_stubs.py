"""Makes PyPI's CUDA build of torch load on a machine without NVIDIA's packages (2.7 GB less to install).

PyPI has no torch for CPUs only on x86-64 Linux, and the CUDA build does not load without libcudart, libcublas and a dozen more. This writes stubs of
them into torch/lib, where torch looks first; each function answers error 100, "no CUDA device". For tests on CPUs; needs gcc and binutils.

usage: cuda_stubs.py      in the environment that has torch
"""
from __future__ import annotations

import collections
import glob
import importlib.util
import os
import re
import subprocess
import tempfile

LIBRARY = re.compile(r"lib(cudart|cublas|cublasLt|cudnn|cufft|cufile|cupti|curand|cusolver|cusparse|cusparseLt|nccl|nvrtc|nvshmem_host|nvJitLink|cuda)\.so")
FUNCTION = re.compile(r"(cu[A-Z]|cuda|__cuda|cublas|cudnn|cufft|cupti|curand|cusolver|cusparse|nccl|nvrtc|nvshmem)")
Versions = dict[str, set[str]]


class Needed:
    """The libraries that torch needs, the functions and their symbol versions, and those without one."""

    def __init__(self) -> None:
        self.libraries: set[str] = set()
        self.versions: dict[str, Versions] = collections.defaultdict(lambda: collections.defaultdict(set))
        self.plain: set[str] = set()

    def read(self, path: str) -> None:
        dynamic = subprocess.run(["readelf", "-d", "-V", "-W", path], capture_output=True, text=True).stdout
        self.libraries |= {name for name in re.findall(r"Shared library: \[(.*?)\]", dynamic) if LIBRARY.match(name)}
        library_of: dict[str, str] = {}
        library = ""
        for line in dynamic.splitlines():
            if found := re.search(r"File: (\S+)", line):
                library = found[1]
            if (found := re.search(r"Name: (\S+)\s+Flags: \S+\s+Version: \d+", line)) and library:
                library_of[found[1]] = library
        symbols = subprocess.run(["nm", "-D", "--undefined-only", "--with-symbol-versions", path], capture_output=True, text=True).stdout
        for line in symbols.splitlines():
            name, _, version = line.split()[-1].partition("@")
            version = version.lstrip("@")
            if version and LIBRARY.match(library_of.get(version, "")):
                self.versions[library_of[version]][version].add(name)
            elif not version and FUNCTION.match(name):
                self.plain.add(name)


def source(names: set[str]) -> str:
    lines = ['const char *cuda_stub_text = "no CUDA device (stub library)";']
    for name in sorted(names):
        text = "GetErrorString" in name or "GetErrorName" in name
        lines.append(f"const char *{name}(void) {{ return cuda_stub_text; }}" if text else f"long {name}(void) {{ return 100; }}")
    return "\n".join(lines) + "\n"


def build(folder: str, library: str, versions: Versions, plain: set[str]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        with open(f"{scratch}/stub.c", "w") as f:
            f.write(source(plain.union(*versions.values())))
        with open(f"{scratch}/stub.map", "w") as f:
            f.writelines(f"{version} {{ global: {'; '.join(sorted(names))}; }};\n" for version, names in versions.items())
        command = ["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", "-O1", "-o", f"{folder}/{library}", f"-Wl,-soname,{library}", f"{scratch}/stub.c"]
        subprocess.run(command + ([f"-Wl,--version-script={scratch}/stub.map"] if versions else []), check=True)


def main() -> None:
    spec = importlib.util.find_spec("torch")
    assert spec and spec.origin
    folder = os.path.join(os.path.dirname(spec.origin), "lib")
    needed = Needed()
    for path in glob.glob(folder + "/*.so*"):
        if not LIBRARY.match(os.path.basename(path)):
            needed.read(path)
    for i, library in enumerate(sorted(needed.libraries)):
        build(folder, library, needed.versions[library], needed.plain if i == 0 else set())
    print(f"{len(needed.libraries)} stubs in {folder}")


if __name__ == "__main__":
    main()
