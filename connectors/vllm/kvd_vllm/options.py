"""What may stand in kv_connector_extra_config. docs/vllm.md prints this table."""

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
    Option("weights", None, str, "what names the weights; default the digest of all their files; `revision`: the resolved commit, and you vouch that the files are its; any other text as it is"),
    Option("hash", "auto", _choice("auto", "engine", "own"), "whose block hashes name blocks: the engine's where they are stable, or kvd's own"),
    Option("mode", "auto", _choice("auto", "sync", "async"), "loads inside a step, beside the steps, or (`auto`) inside where those who wait for them wait less than a step, or 25 ms where nobody else would; inside only in an engine that survives a failed one (below): elsewhere `sync` is refused"),
    Option("cost_model", True, _flag, "load no part of a hit, in memory or on disk, that is measured to take longer than computing it"),
    Option("min_tokens", 0, _number(0, 1 << 24), "shorter hits are not loaded; 0: one block"),
    Option("wait_us", 0, _number(0, 100000), "a step that computes prompts waits at most so long for the daemon's answers; 0: 500, and a 128th of the step"),
    Option("load_ms", 0, _number(0, 600000), "a load is given up after so long; 0: 2000"),
    Option("threads", 0, _number(0, 64), "threads that copy in a synchronous load; 0: chosen from the CPUs there are"),
    Option("sms", 0, _number(0, 1024), "multiprocessors of a GPU that a copy takes at most; 0: 4, with pieces below 4 KiB 8, where the link takes more 16"),
    Option("save_sms", 0, _number(0, 1024), "the same of a save, which runs beside the engine's own kernels; 0: 2"),
    Option("layers", True, _flag, "on GPUs a load within a step comes layer by layer, where the engine waits for each layer by itself"),
    Option("layers_mb", 96, _number(0, 1 << 20), "if all of the step's loads have so many MiB and more: shorter ones are over before layers pay"),
    Option("prefetch", True, _flag, "on GPUs with one rank the loads of a step begin when it is planned, before the engine prepares it"),
    Option("arrange", "blocks", _choice("blocks", "heads", "engine"), "on GPUs before 0.30 the engine is asked to keep all layers of a block together, or only each head's tokens, or nothing"),
    Option("prefault", True, _flag, "touch the cache's and the pool's pages in the background at start"),
    Option("flush_ms", 1000, _number(0, 60000), "at shutdown saves under way are waited for at most so long"),
    Option("max_errors", 32, _number(1, 1 << 20), "after so many internal errors the connector switches itself off"),
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
    rows = [f"| `{o.name}` | `{str(o.default).lower() if o.default is not None else '-'}` | {o.help} |" for o in OPTIONS]
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *rows])
