"""What may stand in kv_connector_extra_config. docs/vllm-reference.md has this list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text not in ("0", "1", "false", "true", "no", "yes", "off", "on"):
        raise ValueError("must be true or false")
    return text in ("1", "true", "yes", "on")


def _number(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        number = int(value)
        if not low <= number <= high:
            raise ValueError(f"must be from {low} to {high}")
        return number

    return parse


def _choice(*names: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in names:
            raise ValueError("must be one of " + ", ".join(names))
        return str(value)

    return parse


@dataclass(frozen=True)
class Option:
    name: str
    default: Any
    parse: Callable[[Any], Any]
    help: str


OPTIONS: tuple[Option, ...] = (
    Option("socket", None, str, "the daemon's socket; default $KVD_SOCKET, else /run/kvd/default.sock"),
    Option("model", None, str, "name of the model in the identity; default its Hugging Face name or the name of its folder"),
    Option("weights", None, str, "what names the weights (above); default the digest of all their files"),
    Option("hash", "auto", _choice("auto", "engine", "own"), "whose block hashes name blocks: the engine's where they are stable, or kvd's own"),
    Option("mode", "auto", _choice("auto", "sync", "async"), "`sync`, `async` loads, or (`auto`) synchronous ones where they hold up other requests for less than a step, or for 25 ms where there are none; `sync` is refused in an engine that does not survive a failed one (below)"),
    Option("cost_model", True, _flag, "load no part of a hit, in memory or on disk, that was measured to take longer than computing it"),
    Option("min_tokens", 0, _number(0, 1 << 24), "shorter hits are not loaded; 0: one block"),
    Option("wait_us", 0, _number(0, 100000), "longest wait of a step that computes prompts for the daemon's answers; 0: 500, and a 128th of the step"),
    Option("load_ms", 0, _number(0, 600000), "deadline of a load; 0: 2000"),
    Option("device", "auto", str, "the GPU whose memory the daemon may lend for hot blocks, by UUID or a name of `gpu.devices`; `auto`: rank 0's; `none`: none"),
    Option("handover", True, _flag, "hand prompts over and receive them, as their `kv_transfer_params` say (this and the next four: docs/pd.md)"),
    Option("handover_ms", 0, _number(0, 86400000), "longest wait for a prompt that another engine hands over; the daemon's `handover.ttl` is the most; 0: 30000, or twice the predicted time to compute it and a second, if that is less"),
    Option("handover_peer", None, str, "`transfer_peer` of requests without one; default this node"),
    Option("handover_device", "own", _choice("own", "none"), "prompts that this engine hands over lie in memory of its own GPU as well, where the daemon has some (`own`), or not (`none`)"),
    Option("prefill_device", None, str, "`transfer_device` of requests without one; default not known: they come from host memory"),
    Option("threads", 0, _number(0, 64), "threads that copy in a synchronous load; 0: chosen from the CPUs there are"),
    Option("sms", 0, _number(0, 1024), "multiprocessors of a GPU that a copy takes at most; 0: 4, with pieces below 4 KiB 8, where the link takes more 16"),
    Option("save_sms", 0, _number(0, 1024), "the same for a save to host memory while the engine generates; 0: 2. While it computes prompts 64, for some 50 us at a time"),
    Option("promote_mb_s", 0, _number(0, 1 << 24), "MB a second of what was used twice that are saved in memory of the GPU while the engine computes; 0: 6000"),
    Option("layers", True, _flag, "on GPUs synchronous loads come layer by layer, if the engine waits for each layer separately"),
    Option("layers_mb", 96, _number(0, 1 << 20), "least MiB of a step's loads that come layer by layer: shorter ones finish before layers pay"),
    Option("prefetch", True, _flag, "on GPUs with one rank the loads of a step begin when it is planned, before the engine prepares it"),
    Option("gpu_states", False, _flag, "on GPUs models with recurrent layers are served, too: no GPU has tested this"),
    Option("arrange", "blocks", _choice("blocks", "heads", "engine"), "on GPUs before 0.30 the engine is asked to keep all layers of a block together, or only each head's tokens, or nothing"),
    Option("prefault", True, _flag, "touch the cache's and the pool's pages in the background at start"),
    Option("flush_ms", 1000, _number(0, 60000), "longest wait for saves in progress at shutdown"),
    Option("max_errors", 32, _number(1, 1 << 20), "number of internal errors after which the connector switches itself off"),
)


def parse(given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Values of all options, and a sentence for each that was unknown or wrong (its default is used then)."""
    values = {option.name: option.default for option in OPTIONS}
    complaints = []
    known = {option.name: option for option in OPTIONS}
    for name, value in given.items():
        option = known.get(name)
        if option is None:
            complaints.append(f"unknown option {name!r} in kv_connector_extra_config (known: {', '.join(known)})")
            continue
        if value is None:
            continue
        try:
            values[name] = option.parse(value)
        except (TypeError, ValueError) as error:
            complaints.append(f"option {name}={value!r}: {error}; using {option.default!r}")
    return values, complaints


def table() -> str:
    """As Markdown."""
    return "\n".join(f"- `{o.name}`{f' ({str(o.default).lower()})' if o.default is not None else ''}: {o.help}" for o in OPTIONS)
