"""Names of weights and adapters: digests of their files.

A half of the connector lists the files of a model when it starts, which is after the engine has read them. The scheduler half digests them whole, in the
background. The digest names the weights only if the engine has read the same bytes: no file may have been changed since the engine's process began. Weights
without a name get a random one: no other engine finds the blocks, and neither does this engine after a restart. (Decision 020.)"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvd_vllm.digests import Cancelled, Digester, Key

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt")
OTHERS = (".json", ".py")  # configurations, and code of the model's own
# Of texts and tokens. Blocks do not depend on them: their keys are token ids.
TEXTS = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json", "chat_template.json")
# Formats whose loaders read weights from the files of the model's folder. Others fetch them elsewhere.
FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "pt", "npcache", "mistral", "gguf", "bitsandbytes", "sharded_state", "runai_streamer", "runai_streamer_sharded")
REVISION = "revision"  # the option `weights`: the operator vouches for the resolved commit


@dataclass(frozen=True)
class File:
    name: str  # path inside the model
    path: str
    key: Key
    written_once: bool  # another content has another path


@dataclass(frozen=True)
class Weights:
    """The weights of an engine at its start. `text`: their name, if no file needs to be read for it; `private`: the reason why they have no name."""

    text: str = ""
    private: str = ""
    kind: str = "files"
    files: tuple[File, ...] = ()

    def fingerprint(self) -> str:
        """Equal in two processes that see the same files, unchanged."""
        if not self.files:
            return self.text or "private"
        return hashlib.sha256(repr((self.kind, [(file.name, file.key) for file in self.files])).encode()).hexdigest()


@dataclass(frozen=True)
class Named:
    """The name. `private`: why it is a random one."""

    text: str
    private: str = ""


def unshared(reason: str) -> Named:
    return Named("unknown:" + secrets.token_hex(16), reason)


# ---- files -----------------------------------------------------------------------------------------------------------


def _is_relevant(path: Path) -> bool:
    return path.suffix in WEIGHTS or (path.suffix in OTHERS and path.name not in TEXTS)


def _paths(folder: str | os.PathLike[str]) -> list[tuple[str, Path]]:
    root = Path(folder)
    if root.is_file():
        return [(root.name, root)]
    return sorted((str(path.relative_to(root)), path) for path in root.rglob("*") if _is_relevant(path) and path.is_file())


def _is_written_once(path: Path) -> bool:
    """Hugging Face's cache: snapshots/COMMIT/NAME is a link to blobs/DIGEST. Such a file is renamed when it is complete, and never changed. Its name is
    not used as its digest."""
    return path.is_symlink() and "snapshots" in path.parts and Path(os.readlink(path)).parent.name == "blobs"


def list_files(folders: list[str]) -> tuple[File, ...]:
    """All files of the folders that the values of blocks may depend on. OSError: stat() of one has failed."""
    found = [(f"{i}/{name}", path) for i, folder in enumerate(folders) for name, path in _paths(folder)]
    return tuple(File(name, str(path), Key.of(os.stat(path)), _is_written_once(path)) for name, path in found)


def hub_folder(name: str, revision: str | None, cache: str | None, file: str = "config.json") -> str | None:
    """The snapshot of a Hugging Face model in the local cache that has this file; None: there is none."""
    try:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(name, file, revision=revision, cache_dir=cache)
    except Exception:
        return None
    return str(Path(path).parent) if isinstance(path, str) else None


def process_start_ns() -> int:
    """When this process began, on the clock of files."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - age_ns


# ---- models ----------------------------------------------------------------------------------------------------------


def _commit(model: Any) -> str | None:
    """The commit of a model from a hub: as the engine has resolved it, else as the local cache does."""
    commit = getattr(getattr(model, "hf_config", None), "_commit_hash", None)
    folder = None if commit else hub_folder(str(model.model), getattr(model, "revision", None), None)
    return commit or (Path(folder).name if folder else None)


def _folders(model: Any, download_dir: str | None) -> list[str] | None:
    """The folders with the files of a model; None: none in this file system."""
    name = str(getattr(model, "model_weights", "") or model.model)
    if os.path.exists(name):
        return [name]
    revision = _commit(model) or getattr(model, "revision", None)
    found = [hub_folder(name, revision, cache) for cache in dict.fromkeys((download_dir, None))]
    return list(dict.fromkeys(folder for folder in found if folder)) or None


def _all_folders(vllm_config: Any) -> list[str] | None:
    """Of the model, of its configuration if that is elsewhere, and of a draft model: its layers are in the cache as well."""
    model, download_dir = vllm_config.model_config, getattr(vllm_config.load_config, "download_dir", None)
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    folders: list[str] = []
    for one in (model, draft):
        found = _folders(one, download_dir) if one is not None else []
        if found is None:
            return None
        folders += found
    other = getattr(model, "hf_config_path", None)
    if other:
        folder = other if os.path.isdir(other) else hub_folder(other, None, None)
        if folder is None:
            return None
        folders.append(folder)
    return list(dict.fromkeys(folders))


def _why_private(vllm_config: Any, load_format: str, vouched: str | None) -> str:
    """Why values do not follow from the weights at the start, or the files in the model's folder are not the weights; empty: they do, and are or are vouched for."""
    more = getattr(vllm_config.load_config, "model_loader_extra_config", None) or {}
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "the scales of the cache are found from the first prompts"
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        return "weights are replaced while the engine runs"
    if not vouched and load_format not in FORMATS + ("dummy",):
        return f"where load_format={load_format} takes weights from is not known"
    if not vouched and "qlora_adapter_name_or_path" in more:
        return "an adapter is merged into the weights at load"
    return ""


def of_model(vllm_config: Any, vouched: str | None, version: str, device: str) -> Weights:
    """The weights of this configuration; no file is read."""
    model, load = vllm_config.model_config, vllm_config.load_config
    load_format = str(getattr(load.load_format, "value", load.load_format))
    private = _why_private(vllm_config, load_format, vouched)
    if private:
        return Weights(private=private)
    if vouched == REVISION:
        commit = _commit(model)
        return Weights(f"commit:{commit}") if commit else Weights(private="weights=revision, but the model has no commit")
    if vouched:
        return Weights(vouched)
    kind = load_format
    if load_format == "dummy":  # drawn with a fixed seed, tensor by tensor of a rank
        kind = f"dummy {version} {device} tp{vllm_config.parallel_config.tensor_parallel_size}"
        stages = int(getattr(vllm_config.parallel_config, "pipeline_parallel_size", 1))
        kind += f" pp{stages}" if stages > 1 else ""
    more = getattr(load, "model_loader_extra_config", None)
    kind += f" {more!r}" if more else ""
    try:
        folders = _all_folders(vllm_config)
        files = list_files(folders) if folders else ()
    except OSError as error:
        return Weights(private=f"the model's files cannot be listed: {error}")
    if not files and load_format != "dummy":
        return Weights(private="the model's files are not in a folder that is seen here")
    return Weights(kind=kind, files=files)


def name_weights(weights: Weights, digester: Digester, started_ns: int) -> Named:
    """Blocks until all files are digested. Cancelled."""
    if weights.private:
        return unshared(weights.private)
    if weights.text:
        return Named(weights.text)
    digest = hashlib.sha256(f"kvd weights 2\n{weights.kind}\n".encode())
    remembered = digester.cache.load()
    for file in weights.files:
        if file.key.ctime_ns >= started_ns and not file.written_once:
            return unshared(f"{file.path} was changed after the engine's start: what the engine has read of it is not known")
        try:
            key, content = digester.file(file.path, remembered)
        except OSError as error:
            return unshared(f"the model's files cannot be read: {error}")
        if key != file.key:
            return unshared(f"{file.path} was changed after the engine has read it")
        digest.update(f"{file.name}\0{key.size}\0{content}\n".encode())
    return Named(f"{'dummy' if weights.kind.startswith('dummy') else 'files'}:{digest.hexdigest()[:32]}")


# ---- adapters --------------------------------------------------------------------------------------------------------


def name_adapter(request: Any, digester: Digester, unknown: str) -> str:
    """A LoRA adapter's name and the digest of its files, or `unknown` if they cannot be read. Blocks until all files are digested. Cancelled."""
    name = str(getattr(request, "lora_name", "") or getattr(request, "name", ""))
    path = str(getattr(request, "lora_path", "") or getattr(request, "path", ""))
    digest = hashlib.sha256(b"kvd adapter 2\n")
    try:
        folder = path if os.path.exists(path) else hub_folder(path, None, None, "adapter_config.json")
        files = list_files([folder]) if folder else ()
        remembered = digester.cache.load()
        for file in files:
            key, content = digester.file(file.path, remembered)
            digest.update(f"{file.name}\0{key.size}\0{content}\n".encode())
    except OSError:  # not readable, or changed while it was read
        files = ()
    return f"{name}@files:{digest.hexdigest()[:32]}" if files else f"{name}@unknown:{unknown}"


class Adapters:
    """Names of adapters. The engine's thread asks; another thread digests the files, after those of the model."""

    WAIT_S = 0.05  # enough for a small adapter, or remembered digests: then its first request is served

    def __init__(self, digester: Digester) -> None:
        self.digester = digester
        self.unknown = secrets.token_hex(16)  # of this engine alone
        self.names: dict[tuple[Any, ...], str] = {}
        self.waiting: set[tuple[Any, ...]] = set()
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None

    def run(self, job: Callable[[], None]) -> None:
        """In the thread that digests, in the order asked for."""
        self.jobs.put(job)
        if self.thread is None:
            self.thread = threading.Thread(target=self._run_jobs, name="kvd-weights", daemon=True)
            self.thread.start()

    def _run_jobs(self) -> None:
        with contextlib.suppress(Cancelled):
            while (job := self.jobs.get()) is not None:
                job()

    def text(self, request: Any) -> str:
        """Empty: not known yet, or an adapter that is reloaded in place, where the weights of a request are not known. Its blocks are neither loaded nor saved."""
        if getattr(request, "load_inplace", False):
            return ""
        key = tuple(getattr(request, name, None) for name in ("lora_name", "lora_path", "lora_int_id"))
        if key not in self.names and key not in self.waiting:
            done = threading.Event()
            self.waiting.add(key)
            self.run(lambda: self._name(key, request, done))
            done.wait(self.WAIT_S)
        return self.names.get(key, "")

    def _name(self, key: tuple[Any, ...], request: Any, done: threading.Event) -> None:
        try:
            self.names[key] = name_adapter(request, self.digester, self.unknown)
        except Cancelled:
            raise
        except Exception:
            self.names[key] = ""
        done.set()

    def close(self, seconds: float) -> None:
        self.digester.cancel()
        self.jobs.put(None)
        if self.thread is not None:
            self.thread.join(seconds)
