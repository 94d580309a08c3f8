"""What the kv_transfer_params of a request allow to load and to save: keys of vLLM's own offloading (`max_load_tokens`, `max_offload_tokens`, `kv_load_tiers`), and
`skip_read` and `skip_write` for nothing at all."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("vllm.kvd")

ALL = 2**32 - 1
MEDIA = ("CPU", "STORAGE")
MOST_COMPLAINTS = 10  # clients choose the parameters

complaints = 0


def find(request: Any) -> tuple[int, int, bool]:
    """Tokens to load beyond those that the engine has, tokens to save from the first on, and whether nothing may come from disk. What is not understood is no limit, as in vLLM."""
    params = request.kv_transfer_params
    if not isinstance(params, dict):
        return ALL, ALL, False
    media = _media(params.get("kv_load_tiers"))
    load = 0 if params.get("skip_read") is True or "CPU" not in media else _tokens("max_load_tokens", params)
    save = 0 if params.get("skip_write") is True else _tokens("max_offload_tokens", params)
    return load, save, "STORAGE" not in media


def _tokens(name: str, params: dict[str, Any]) -> int:
    value = params.get(name)
    if value is None or (type(value) is int and value >= 0):
        return ALL if value is None else min(value, ALL)
    _complain(f"{name} must be a number of tokens")
    return ALL


def _media(tiers: Any) -> set[str]:
    """The media that entries {"medium": ..., "locality": ...} name; each key may be missing. The daemon's memory and disk are local. No entry is right: all media."""
    entries = [_entry(one) for one in tiers] if isinstance(tiers, list) else [None]
    found = [media for media in entries if media is not None]
    if tiers is not None and len(found) < len(entries):
        _complain("kv_load_tiers must be a list of {medium: CPU or STORAGE, locality: LOCAL or REMOTE}")
    return set().union(*found) if found or tiers == [] else set(MEDIA)


def _entry(entry: Any) -> set[str] | None:
    if not isinstance(entry, dict):
        return None
    medium, locality = (str(entry.get(name) or "").upper() for name in ("medium", "locality"))
    if medium not in ("", *MEDIA) or locality not in ("", "LOCAL", "REMOTE"):
        return None
    return set() if locality == "REMOTE" else {medium} if medium else set(MEDIA)


def _complain(why: str) -> None:
    global complaints
    complaints += 1
    if complaints <= MOST_COMPLAINTS:
        logger.warning("kvd: a request's kv_transfer_params: %s: no limit", why)
