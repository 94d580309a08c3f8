"""Fingerprints of what decides the values in a cache: weight files and adapters."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt")
CONFIGS = ("config.json", "params.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json", "adapter_config.json")
WHOLE = 1 << 20  # files up to this size are read whole
ENDS = 64 << 10  # of larger ones the first and last bytes ...
SAMPLES = 64  # ... and so many pieces between them
PIECE = 4 << 10


def _relevant(path: Path) -> bool:
    return path.name in CONFIGS or path.name.endswith(".index.json") or path.suffix in WEIGHTS


def _file(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE:
            digest.update(file.read())
            return
        digest.update(file.read(ENDS))
        for i in range(SAMPLES):
            file.seek(ENDS + (size - 2 * ENDS - PIECE) * i // SAMPLES)
            digest.update(file.read(PIECE))
        file.seek(size - ENDS)
        digest.update(file.read())


def of_folder(folder: str | os.PathLike[str]) -> str | None:
    """Names, sizes and sampled contents of the weight and configuration files; None: there are none."""
    root = Path(folder)
    files = sorted(path for path in root.rglob("*") if path.is_file() and _relevant(path)) if root.is_dir() else []
    if root.is_file():
        files, root = [root], root.parent
    if not files:
        return None
    digest = hashlib.sha256(b"kvd weights 1\n")
    for path in files:
        digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\n".encode())
        _file(digest, path)
    return "files:" + digest.hexdigest()[:32]


def of_hub(name: str, revision: str | None) -> str | None:
    """Commit of a Hugging Face model as resolved in the local cache; None: not there."""
    try:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(name, "config.json", revision=revision)
    except Exception:
        return None
    return "commit:" + Path(path).parent.name if isinstance(path, str) else None


def of_model(model_config: object, load_format: str, unknown: str) -> str:
    """Of the model an engine runs. `unknown` is used where nothing can be said: it must not be shared between engines."""
    name = str(getattr(model_config, "model_weights", "") or getattr(model_config, "model", ""))
    if load_format == "dummy":
        return f"dummy:{getattr(model_config, 'seed', 0)}:{of_folder(getattr(model_config, 'model', '')) or ''}"
    found = of_folder(name)
    if found is None:
        commit = getattr(getattr(model_config, "hf_config", None), "_commit_hash", None)
        found = f"commit:{commit}" if commit else of_hub(name, getattr(model_config, "revision", None))
    return found or f"unknown:{unknown}"


def of_adapter(request: object, unknown: str) -> str:
    """Text that names a LoRA adapter: its name and what is in its files. Empty for one that is reloaded in place: which of its weights a request is computed
    with, nobody says, so its blocks are neither loaded nor saved."""
    if getattr(request, "load_inplace", False):
        return ""
    name = str(getattr(request, "lora_name", "") or getattr(request, "name", ""))
    path = str(getattr(request, "lora_path", "") or getattr(request, "path", ""))
    try:
        found = of_folder(path) if path else None
    except OSError:  # may not be read, or is changing at this moment
        found = None
    if found is None and path:
        found = of_hub(path, None)
    return f"{name}@{found or 'unknown:' + unknown}"
