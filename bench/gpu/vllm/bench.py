"""A real vLLM on a GPU with kvd, with the caches others offer, and with none: bench.py [--graph] [--seconds N] [--shape S] [--out DIR] CONFIGURATION...

A configuration is one or more engines, one after another, each in a process of its own with a stop-watch; what is known is written after each. Needs vLLM and,
for kvd, its programs (--kvd FOLDER with bin/kvd and bin/kvctl) and the package kvd_vllm on PYTHONPATH. README.md says how to run it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}
NOTHING = {"kv_connector": "Nothing", "kv_connector_module_path": "nothing", "kv_role": "kv_both"}


def kvd(**extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "KvdConnector",
        "kv_connector_module_path": "kvd_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": "SOCKET", **extra},
    }


@dataclass
class Configuration:
    """`engines`: (name, phases) one after another; "daemon" as phases restarts the daemon instead."""

    connector: dict[str, Any] | None
    engines: list[tuple[str, list[str]]]
    runner: int = 2
    daemon: str = ""  # "": none; "memory"; "disk": with a disk tier
    server: bool = False  # LMCache's
    environment: dict[str, str] = field(default_factory=dict)
    weights: str = "dummy"


ALL = ["cold", "gpu", "hit", "together", "decode"]
CHAIN = [("first engine", ["cold", "gpu", "hit", "together"]), ("engine restarted", ["hit", "together", "decode"])]
CHECKS = [("first engine", ["tokens", "same", "control"]), ("engine restarted", ["same"]), ("daemon", ["daemon"]), ("daemon restarted", ["same"])]
DISK = [("first engine", ["cold"]), ("daemon", ["daemon"]), ("daemon restarted", ["hit"])]


def native(gib: int) -> dict[str, Any]:
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": gib << 30}}


LMCACHE = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
LMSERVER = {
    "kv_connector": "LMCacheMPConnector",
    "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": 5555},
}


def lmcache(gib: int) -> dict[str, str]:
    return {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": str(gib), "LMCACHE_CHUNK_SIZE": "256", "LMCACHE_TRACK_USAGE": "false"}


def lmserver(gib: int) -> list[str]:
    options = {"host": "127.0.0.1", "port": 5555, "l1-size-gb": gib, "eviction-policy": "LRU", "max-workers": 4}
    return [sys.executable, "-m", "lmcache.v1.multiprocess.server", *(text for name, value in options.items() for text in (f"--{name}", str(value)))]


def configurations(gib: int) -> dict[str, Configuration]:
    table: dict[str, Configuration] = {}
    for runner in (2, 1):
        v = f"v{runner}"
        table[f"none-{v}"] = Configuration(None, [("first engine", ["cold", "gpu", "decode"])], runner)
        table[f"nothing-{v}"] = Configuration(NOTHING, [("first engine", ["cold", "gpu", "decode"])], runner)
        table[f"native-{v}"] = Configuration(native(gib), [("first engine", ALL)], runner)
        table[f"lmcache-{v}"] = Configuration(LMCACHE, [("first engine", ALL)], runner, environment=lmcache(gib))
        table[f"lmserver-{v}"] = Configuration(LMSERVER, CHAIN, runner, server=True)
        table[f"kvd-{v}"] = Configuration(kvd(), CHAIN, runner, "memory")
        table[f"kvd-{v}-async"] = Configuration(kvd(mode="async"), CHAIN, runner, "memory")
        table[f"kvd-{v}-plain"] = Configuration(kvd(arrange="engine"), CHAIN, runner, "memory")
        table[f"disk-{v}"] = Configuration(kvd(), DISK, runner, "disk")
        table[f"check-{v}"] = Configuration(kvd(guard=False, load_ms=20000), CHECKS, runner, "disk", weights="drawn")
        table[f"check-{v}-async"] = Configuration(kvd(guard=False, load_ms=20000, mode="async"), CHECKS[:2], runner, "memory", weights="drawn")
        table[f"check-native-{v}"] = Configuration(native(gib), [("first engine", ["tokens", "same"])], runner, weights="drawn")
    return table


class Daemon:
    def __init__(self, args: argparse.Namespace, work: Path, disk: bool) -> None:
        self.work, self.disk, self.args = work, disk, args
        self.socket = str(work / "run" / "default.sock")
        self.kvctl = str(args.kvd / "bin" / "kvctl")
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        command = [str(self.args.kvd / "bin" / "kvd"), f"--run_dir={self.work / 'run'}", f"--cpu.size={self.args.pool_gib}GiB"]
        if self.disk:
            command += [f"--nvme.path={self.work / 'disk'}", f"--nvme.size={self.args.pool_gib}GiB"]
        command += self.args.kvd_option
        self.process = subprocess.Popen(command, stdout=(self.work / "kvd.log").open("ab"), stderr=subprocess.STDOUT, start_new_session=True)
        end = time.monotonic() + 60
        while subprocess.run([self.kvctl, "--socket", self.socket, "status"], capture_output=True).returncode not in (0, 2):
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError(f"no daemon: {(self.work / 'kvd.log').read_text()[-2000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            self.process = None

    def stats(self) -> dict[str, str]:
        text = subprocess.run([self.kvctl, "--socket", self.socket, "stats"], capture_output=True, text=True).stdout
        return {line.split()[0]: line.split(None, 1)[1] for line in text.splitlines() if " " in line.strip()}


class Run:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.end = time.monotonic() + args.seconds
        self.results: dict[str, Any] = {}
        self.log = (args.out / "log.txt").open("a")
        self.args.models.mkdir(parents=True, exist_ok=True)

    def save(self) -> None:
        part = self.args.out / "results.part"
        part.write_text(json.dumps({"graph": self.args.graph, "shape": self.args.shape, "results": self.results}, indent=1))
        part.replace(self.args.out / "results.json")
        (self.args.out / "table.md").write_text(table(self.results))

    def say(self, text: str) -> None:
        print(text, flush=True)
        self.log.write(text + "\n")
        self.log.flush()

    def engine(self, name: str, at: str, c: Configuration, phases: list[str], work: Path, daemon: Daemon | None) -> bool:
        connector = json.loads(json.dumps(c.connector).replace("SOCKET", daemon.socket if daemon else ""))
        order = {
            "connector": connector,
            "phases": phases,
            "shape": self.args.shape,
            "weights": c.weights,
            "graph": self.args.graph,
            "models": str(self.args.models),
            "kv_gib": self.args.kv_gib,
            "seed": self.args.seed,
            "sizes": self.args.sizes,
            "prompts": self.args.prompts,
            "tokens": str(work / "tokens.json"),
            "kvctl": daemon.kvctl if daemon else "",
            "socket": daemon.socket if daemon else "",
            "end": "abrupt",
        }
        stem = at.replace(" ", "_")
        (work / f"{stem}.order").write_text(json.dumps(order))
        result, log = work / f"{stem}.json", work / f"{stem}.log"
        environment = {**os.environ, **ENVIRONMENT, **c.environment, "VLLM_USE_V2_MODEL_RUNNER": str(c.runner - 1)}
        environment["PYTHONPATH"] = f"{HERE}:{environment.get('PYTHONPATH', '')}"
        limit = min(self.args.engine_seconds or (170 if self.args.graph else 110), self.end - time.monotonic())
        began = time.monotonic()
        child = subprocess.Popen([sys.executable, str(HERE / "engine.py"), str(work / f"{stem}.order"), str(result)], stdout=log.open("wb"), stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            status: Any = child.wait(max(limit, 1))
        except subprocess.TimeoutExpired:
            status = "out of time"
        try:
            os.killpg(child.pid, signal.SIGKILL)  # the engine's other processes, and the engine when it is late
        except ProcessLookupError:
            pass
        child.wait()
        found = json.loads(result.read_text()) if result.exists() else {}
        found["seconds"] = round(time.monotonic() - began, 1)
        if status != 0 or not found.get("done"):
            found["failed"] = status
        self.results.setdefault(name, {})[at] = found
        self.save()
        text = log.read_text(errors="replace")
        said = [line for line in text.splitlines() if "kvd:" in line or " kvx" in line]
        self.log.write(f"==== {name}, {at}\n" + "\n".join(said[-40:]) + "\n---- end of its log\n" + text[-6000:] + "\n")
        self.say(f"{name}, {at}: {json.dumps(found)}")
        if "failed" in found:
            self.say("\n".join(said[-8:] + text.splitlines()[-15:]))
        return "failed" not in found

    def configuration(self, name: str, c: Configuration) -> None:
        work = self.args.work / name
        shutil.rmtree(work, ignore_errors=True)
        (work / "run").mkdir(parents=True)
        (work / "disk").mkdir()
        daemon = Daemon(self.args, work, c.daemon == "disk") if c.daemon else None
        server = None
        try:
            if daemon:
                daemon.start()
            if c.server:
                server = subprocess.Popen(lmserver(self.args.pool_gib), stdout=(work / "server.log").open("wb"), stderr=subprocess.STDOUT, start_new_session=True)
                time.sleep(12)
            for at, phases in c.engines:
                if self.end - time.monotonic() < 20:
                    self.say(f"{name}: no time left for: {at}")
                    return
                if phases == ["daemon"]:
                    assert daemon is not None
                    self.results.setdefault(name, {})["daemon before its restart"] = counters(daemon)
                    daemon.stop()
                    daemon.start()
                elif not self.engine(name, at, c, phases, work, daemon):
                    return
            if daemon:
                self.results[name]["daemon at the end"] = counters(daemon)
        except (RuntimeError, OSError) as error:
            self.results.setdefault(name, {})["error"] = repr(error)
            self.say(f"{name}: {error!r}")
        finally:
            if server:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()
            if daemon:
                daemon.stop()
                self.log.write((work / "kvd.log").read_text(errors="replace")[-4000:])
            self.save()
            shutil.rmtree(work, ignore_errors=True)


def counters(daemon: Daemon) -> dict[str, str]:
    wanted = ("kvd_blocks", "kvd_leases", "kvd_puts", "kvd_pins", "kvd_evicted_cpu_total", "kvd_disk_written_bytes_total", "kvd_disk_read_bytes_total", "kvd_disk_read_seconds", "kvd_cpu_huge_pages")
    stats = daemon.stats()
    return {name: value for name, value in stats.items() if name in wanted or name.startswith("kvd_blocks")}


def cell(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    if "ms" in value:
        text = f"{value['ms']:g}"
        return text if "cached" not in value else f"{text} ({'/'.join(map(str, value['cached']))})"
    return ", ".join(f"{k} {v}" for k, v in value.items() if v != [])


def table(results: dict[str, Any]) -> str:
    """Milliseconds, medians; in brackets the prompt's tokens that were cached."""
    rows: dict[str, dict[str, str]] = {}
    for name, engines in results.items():
        for at, found in engines.items():
            if not isinstance(found, dict) or at.startswith("daemon at") or at.startswith("daemon before"):
                continue
            for what, value in found.items():
                label = what if at == "first engine" else f"{at}: {what}"
                if what != "done":
                    rows.setdefault(label, {})[name] = cell(value)
    names = list(results)
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    lines += [f"| {label} | " + " | ".join(values.get(name, "") for name in names) + " |" for label, values in rows.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    known = configurations(0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog="configurations: " + " ".join(known))
    parser.add_argument("names", nargs="+", choices=list(known), metavar="CONFIGURATION")
    parser.add_argument("--graph", action="store_true", help="torch.compile and CUDA graphs, as vllm serve does")
    parser.add_argument("--seconds", type=float, default=560, help="no engine starts, and none runs, after so long")
    parser.add_argument("--engine-seconds", type=float, default=0, help="of one engine at most; default 110, with --graph 170")
    parser.add_argument("--shape", default="llama8b")
    parser.add_argument("--sizes", type=json.loads, default={"1030": 5, "10250": 5, "32780": 3}, help="tokens of a prompt: how many prompts")
    parser.add_argument("--pool-gib", type=int, default=28, help="of every cache outside of the GPU")
    parser.add_argument("--kv-gib", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=20, help="of a check")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kvd", type=Path, default=Path("build/release"), help="folder with bin/kvd and bin/kvctl")
    parser.add_argument("--kvd-option", action="append", default=[], help="for the daemon, as --kvd-option=--cpu.huge_pages=on")
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/kvd-bench-models"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/kvd-bench-vllm"))
    parser.add_argument("--out", type=Path, default=Path("."))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.kvd = args.kvd.resolve()
    run = Run(args)
    for name in args.names:
        if run.end - time.monotonic() < 40:
            run.say(f"{name}: no time left")
            continue
        run.configuration(name, configurations(args.pool_gib)[name])
    print((args.out / "table.md").read_text() if (args.out / "table.md").exists() else "nothing was run")
    failed = [name for name, engines in run.results.items() if "error" in engines or any(isinstance(f, dict) and "failed" in f for f in engines.values())]
    wrong = [name for name, engines in run.results.items() for f in engines.values() if isinstance(f, dict) and "same" in f and (f["same"]["right"] != f["same"]["of"] or f["same"]["not all found"])]
    if failed or wrong:
        print(f"failed: {failed}; other answers or fewer hits: {wrong}")
        sys.exit(1)


if __name__ == "__main__":
    main()
