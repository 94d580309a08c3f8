"""A real vLLM on a GPU with kvd, with the caches others offer, and with none: bench.py [--graph] [--seconds N] [--shape S] [--out DIR] CONFIGURATION...

A configuration is one or more engines, one after another or in turns, each in a process of its own with a stop-watch; what is known is written after each, and
kept beside what is in the folder already. Needs vLLM and, for kvd, its programs (--kvd FOLDER with bin/kvd and bin/kvctl) and the package kvd_vllm on PYTHONPATH. README.md says how to run it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import faults
import goals
from configurations import COMPILE, DAEMON, Configuration, configurations
from daemon import Daemon

HERE = Path(__file__).resolve().parent
ENVIRONMENT = dict(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_HOST_IP="127.0.0.1", VLLM_USE_FLASHINFER_SAMPLER="0", PYTHONHASHSEED="0", PYTHONDONTWRITEBYTECODE="1")
STEP_TOKENS = 8192  # that an engine computes in one step at most


class Run:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.end = time.monotonic() + args.seconds
        self.children: list[subprocess.Popen] = []
        self.lock = threading.Lock()
        self.started = False  # an engine has: what it compiled is kept
        self.results: dict[str, Any] = {}
        earlier = args.out / "results.json"
        if earlier.exists():
            self.results = {name: found for name, found in json.loads(earlier.read_text())["results"].items() if name not in args.names}
        self.log = (args.out / "log.txt").open("a")
        self.args.models.mkdir(parents=True, exist_ok=True)

    def left(self) -> float:
        return self.end - time.monotonic()

    def save(self) -> None:
        with self.lock:
            faults.write(self.args.out, "results.json", json.dumps({"graph": self.args.graph, "shape": self.args.shape, "results": self.results}, indent=1))
            (self.args.out / "table.md").write_text(table(self.results))
            (self.args.out / "goals.md").write_text(goals.table(self.results))

    def say(self, text: str) -> None:
        print(text, flush=True)
        self.log.write(text + "\n")
        self.log.flush()

    def daemon_options(self, c: Configuration, work: Path) -> list[str]:
        gib = c.pool_gib or self.args.pool_gib
        options = [f"--cpu.size={gib}GiB", f"--cpu.ahead={self.args.ahead}"]
        if c.daemon != "memory":
            options += [f"--nvme.path={work / 'disk'}", f"--nvme.size={gib}GiB"]
        if c.gpu_gib:
            options += [f"--gpu.size={c.gpu_gib}GiB"]
        return options

    def order(self, c: Configuration, work: Path, daemon: Daemon | None) -> dict[str, Any]:
        """What every engine of a configuration is told, but for its connector, its phases and its share."""
        same = {name: getattr(self.args, name) for name in ("shape", "seed", "sizes", "prompts", "pause")}
        return {
            **same,
            "weights": c.weights,
            "graph": self.args.graph if c.graph is None else c.graph,
            "options": c.options,
            "models": str(self.args.models),
            "kv_gib": c.kv_gib or self.args.kv_gib,
            "step_tokens": STEP_TOKENS,
            "share": 0.1 if c.beside else 0.5 if c.gpu_gib else 0.8,
            "gpus": c.gpus,
            "gpu_gib": c.gpu_gib,
            "tokens": str(work / "tokens.json"),
            "kvctl": daemon.kvctl if daemon else "",
            "socket": daemon.socket if daemon else "",
            "profile": str(self.args.out.resolve() / "profile"),
            "profiled": c.profiled,
            "daemon": {"kvd": str(self.args.kvd), "work": str(work), "options": self.daemon_options(c, work)} if c.daemon == "own" else None,
        }

    def start(self, c: Configuration, stem: Path, order: dict[str, Any], devices: str = "") -> subprocess.Popen:
        order["connector"] = json.loads(json.dumps(order["connector"]).replace("SOCKET", order["socket"]))
        stem.with_suffix(".order").write_text(json.dumps(order))
        own = {name: value.replace("WORK", str(stem.parent)) for name, value in c.environment.items()}
        environment = {**os.environ, **ENVIRONMENT, **own, "VLLM_USE_V2_MODEL_RUNNER": str(c.runner - 1), "FAULTS_FOLDER": str(stem.parent), "BENCH_WATCH": str(stem.with_suffix(".watch"))}
        if devices:
            environment["CUDA_VISIBLE_DEVICES"] = devices
        environment["PYTHONPATH"] = f"{HERE}:{environment.get('PYTHONPATH', '')}"
        command = [sys.executable, str(HERE / "phases.py"), str(stem.with_suffix(".order")), str(stem.with_suffix(".json"))]
        child = subprocess.Popen(command, stdout=stem.with_suffix(".log").open("wb"), stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        self.children.append(child)
        return child

    def finish(self, child: subprocess.Popen, stem: Path, name: str, at: str, limit: float) -> bool:
        """Its end, at the latest after so long; what it has found so far counts in any case."""
        began = time.monotonic()
        try:
            status: Any = child.wait(max(limit, 1))
        except subprocess.TimeoutExpired:
            status = "out of time"
        finally:
            end_group(child)  # the engine's other processes, and the engine when it is late or its caller has gone
        found = read(stem.with_suffix(".json"))
        found["seconds"] = round(time.monotonic() - began, 1)
        if status != 0 or not found.get("done"):
            found["failed"] = status
        self.started = self.started or bool(found.get("done"))
        self.results.setdefault(name, {})[at] = found
        self.save()
        text = stem.with_suffix(".log").read_text(errors="replace")
        said = [line for line in text.splitlines() if "kvd:" in line or " kvx" in line]
        self.log.write(f"==== {name}, {at}\n" + "\n".join(said[-40:]) + "\n---- end of its log\n" + text[-6000:] + "\n")
        self.say(f"{name}, {at}: {json.dumps(found)}")
        if "failed" in found:
            self.say("\n".join(said[-8:] + text.splitlines()[-15:]))
        return "failed" not in found

    def limit(self) -> float:
        return min(self.args.engine_seconds or (170 if self.args.graph else 110), self.left())

    def one_by_one(self, name: str, c: Configuration, work: Path, daemon: Daemon | None) -> None:
        for at, phases in c.engines:
            if self.left() < self.args.least:
                self.say(f"{name}: no time left for: {at}")
                return
            if phases in DAEMON:
                assert daemon is not None
                {"daemon": daemon.restart, "crash": daemon.crash, "upgrade": daemon.upgrade}[phases[0]]()
                continue
            stem = work / at.replace(" ", "_")
            child = self.start(c, stem, {**self.order(c, work, daemon), "connector": c.connector, "phases": phases})
            if not self.finish(child, stem, name, at, self.limit()):
                return

    def wait_for_turns(self, c: Configuration, work: Path, children: dict[str, subprocess.Popen]) -> None:
        """Until all have ended. One that ends before it is done, or hangs, would keep the others waiting for its turn until no time is left for anybody."""
        until = time.monotonic() + min(self.left(), max(self.limit(), 2 * c.turns(self.args.rounds)))
        while time.monotonic() < until and any(child.poll() is None for child in children.values()):
            if any(child.poll() is not None and not read(work / f"{member}.json").get("done") for member, child in children.items()):
                return
            time.sleep(0.2)

    def are_ready(self, work: Path, children: dict[str, subprocess.Popen]) -> bool:
        """Waits until all of them are, or one never will be."""
        until = time.monotonic() + self.limit()
        while time.monotonic() < until and all(child.poll() is None for child in children.values()):
            if all(read(work / f"{member}.json").get("ready") for member in children):
                return True
            time.sleep(0.2)
        return False

    def in_turns(self, name: str, c: Configuration, work: Path, daemon: Daemon | None) -> None:
        """Started one after another, so that the later ones find what the first has compiled, unless that is there; then round by round."""
        turn = work / "turn"
        turn.write_text("-1")
        children: dict[str, subprocess.Popen] = {}
        share = {"kv_gib": c.kv_gib or self.args.ring_kv_gib, "share": (0.6 if c.gpu_gib else 0.9) / len(c.ring), "phases": ["turns"]}
        try:
            for me, (member, connector) in enumerate(c.ring.items()):
                place = {"file": str(turn), "me": me, "of": len(c.ring), "rounds": self.args.rounds, "round": c.round}
                children[member] = self.start(c, work / member, {**self.order(c, work, daemon), **share, "connector": connector, "turn": place, "profile": str(self.args.out.resolve() / "profile" / member)})
                if not self.args.at_once and not self.are_ready(work, children):
                    break
            if len(children) == len(c.ring) and self.are_ready(work, children):
                turn.write_text("0")
                self.wait_for_turns(c, work, children)
            for member, child in children.items():
                self.finish(child, work / member, name, member, 1)
                for profile in sorted((self.args.out / "profile" / member).glob("steps_*.gz")):
                    self.results[name][member]["between kernels"] = found = gaps(profile)
                    self.say(f"{name}, {member}: between kernels: {json.dumps(found)}")
        finally:
            for child in children.values():
                end_group(child)

    def as_pair(self, name: str, c: Configuration, work: Path, daemon: Daemon | None) -> None:
        """On two GPUs, or both on the one there is."""
        count = max(1, len(list(Path("/proc/driver/nvidia/gpus").glob("*"))))
        first, last = c.pair.values()
        places = [range(min(first, count)), range(count)[-last:]]
        shared = set(places[0]) & set(places[1])
        more = {"share": 0.45, "kv_gib": self.args.pair_kv_gib} if shared else {}
        children: dict[str, subprocess.Popen] = {}
        try:
            for (member, gpus), place, phases in zip(c.pair.items(), places, c.pair_phases()):
                order = {**self.order(c, work, daemon), **more, "connector": c.connector, "gpus": gpus, "phases": phases, "pair": str(work / "pair")}
                order["step_tokens"] = self.args.prefill_step if member == "prefill" else STEP_TOKENS
                children[member] = self.start(c, work / member, order, ",".join(map(str, place)))
            until = time.monotonic() + 2 * self.limit()
            while time.monotonic() < until and all(child.poll() is None for child in children.values()):
                time.sleep(0.2)
            for member, child in children.items():
                self.finish(child, work / member, name, member, 20)
        finally:
            for child in children.values():
                end_group(child)

    def configuration(self, name: str, c: Configuration) -> None:
        work = self.args.work / name
        shutil.rmtree(work, ignore_errors=True)
        (work / "run").mkdir(parents=True)
        (work / "disk").mkdir()
        daemon = Daemon(self.args.kvd, work, self.daemon_options(c, work)) if c.daemon else None
        try:
            if daemon and c.daemon != "own":
                start_daemon(daemon)
            (self.in_turns if c.ring else self.one_by_one)(name, c, work, daemon)
            if c.pair:
                self.as_pair(name, c, work, daemon)
        except (RuntimeError, OSError) as error:
            self.results.setdefault(name, {})["error"] = repr(error)
            self.say(f"{name}: {error!r}")
        finally:
            if daemon:
                daemon.stop()
                self.log.write((work / "kvd.log").read_text(errors="replace")[-4000:] if (work / "kvd.log").exists() else "")
            self.save()
            shutil.rmtree(work, ignore_errors=True)

    def side_by_side(self, names: list[str]) -> None:
        """Configurations that are not timed, on one GPU at once."""
        try:
            with ThreadPoolExecutor(self.args.beside) as pool:
                list(pool.map(lambda name: self.configuration(name, chosen(self.args, name)), names))
        finally:
            for child in self.children:
                end_group(child)

    def all(self) -> None:
        if any(chosen(self.args, name).weights == "drawn" for name in self.args.names):  # before any engine, to which files that change after its start have no name
            subprocess.run([sys.executable, str(HERE / "model.py"), str(self.args.models), self.args.shape], check=True)
        beside = [name for name in self.args.names if chosen(self.args, name).beside]
        if beside:
            self.side_by_side(beside)
        for name in self.args.names:
            if name in beside:
                continue
            c = chosen(self.args, name)
            needed = c.seconds(self.args.graph, self.args.rounds) + (COMPILE if self.args.graph and not self.started else 0)
            if self.left() < needed * self.args.caution:
                self.say(f"{name}: no time left: it takes about {needed} s, there are {self.left():.0f}")
                continue
            self.configuration(name, c)


def gaps(profile: Path) -> dict[str, Any]:
    """Of a torch profile's stream with most kernels: what lies between two of them, where that is under 5 us: within a graph, not between two."""
    with gzip.open(profile) as file:
        events = json.load(file)["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    streams = Counter(e["args"]["stream"] for e in kernels).most_common(1)
    if not streams:
        return {"kernels": 0}
    there = sorted((e for e in kernels if e["args"]["stream"] == streams[0][0]), key=lambda e: e["ts"])
    between = sorted(b["ts"] - a["ts"] - a["dur"] for a, b in zip(there, there[1:]))
    between = [gap for gap in between if gap < 5.0]
    if not between:
        return {"kernels": len(there)}
    return {"kernels": len(there), "mean us": round(sum(between) / len(between), 3), "median us": round(between[len(between) // 2], 3)}


def end_group(child: subprocess.Popen) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


def read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def start_daemon(daemon: Daemon) -> None:
    """What engines before have pinned comes back a while after their end."""
    end = time.monotonic() + 30
    while True:
        try:
            return daemon.start()
        except RuntimeError as error:
            if "available now" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(1)


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
            if not isinstance(found, dict):
                continue
            for what, value in found.items():
                label = what if at == "first engine" else f"{at}: {what}"
                if what != "done":
                    rows.setdefault(label, {})[name] = cell(value)
    names = list(results)
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    lines += [f"| {label} | " + " | ".join(values.get(name, "") for name in names) + " |" for label, values in rows.items()]
    return "\n".join(lines) + "\n"


def chosen(args: argparse.Namespace, name: str) -> Configuration:
    c = configurations(args.pool_gib)[name]
    c.gpu_gib = c.gpu_gib and (args.gpu_gib or c.gpu_gib)
    if c.ring and args.ring:
        unknown = {member.partition(".")[0] for member in args.ring.split(",")} - set(c.ring)
        if unknown:
            raise SystemExit(f"{name} takes turns of {', '.join(c.ring)}: no {', '.join(sorted(unknown))}")
        c.ring = {member: c.ring[member.partition(".")[0]] for member in args.ring.split(",")}
    return c


def dry_run(args: argparse.Namespace) -> None:
    total, beside = COMPILE if args.graph else 0, 0
    for name in args.names:
        c = chosen(args, name)
        seconds = c.seconds(args.graph, args.rounds)
        total += 0 if c.beside and beside % args.beside else seconds
        beside += c.beside
        steps = [f"{at} ({' '.join(phases)})" for at, phases in c.engines] + ([" and ".join(f"{at} ({' '.join(phases)})" for at, phases in zip(c.pair, c.pair_phases()))] if c.pair else [])
        plan = ", then ".join(steps) or f"in {args.rounds} rounds: {', '.join(c.ring)}"
        print(f"{name}: {seconds} s: runner V{c.runner}, {c.gpus} GPU, daemon: {c.daemon or 'none'}; {plan}; {json.dumps(list(c.ring.values()) if c.ring else c.connector)}")
    print(f"about {total} s of {args.seconds:g}")


OPTIONS: tuple[tuple[str, Any, str], ...] = (
    ("graph", False, "torch.compile and CUDA graphs, as vllm serve does"),
    ("seconds", 560.0, "no engine starts, and none runs, after so long"),
    ("engine-seconds", 0.0, "of one engine at most; default 110, with --graph 170"),
    ("shape", "llama8b", "of the model (model.py)"),
    ("sizes", {"1030": 5, "10250": 5, "32780": 3}, "tokens of a prompt: how many prompts"),
    ("pool-gib", 36, "of every cache outside of the GPU"),
    ("gpu-gib", 0, "of kvd's memory on each GPU, where a configuration has some; default its own"),
    ("beside", 8, "configurations that are not timed and run at once"),
    ("kv-gib", 48, "of an engine's cache"),
    ("prompts", 20, "of a check"),
    ("seed", 1, "of prompts"),
    ("kvd", Path("build/release"), "folder with bin/kvd and bin/kvctl"),
    ("models", Path("/dev/shm/kvd-bench-models"), "where models are made"),
    ("work", Path("/tmp/kvd-bench-vllm"), "of daemons and engines; removed"),
    ("out", Path("."), "results"),
    ("ahead", "all", "memory the daemon prepares before it is needed: cpu.ahead"),
    ("rounds", 5, "of engines that take turns"),
    ("at-once", False, "start them together: what they compile is there"),
    ("ring", "", "which of them, in the order they start: none,kvd; all by default; nothing.2 is one more that does nothing"),
    ("ring-kv-gib", 20, "of each of them"),
    ("pair-kv-gib", 12, "of each engine of a pair on one GPU"),
    ("prefill-step", STEP_TOKENS, "tokens that the prefilling engine of a pair computes in one step"),
    ("least", 20.0, "no engine is started with fewer seconds left"),
    ("caution", 0.7, "a configuration is begun when so much of what it takes is left"),
    ("pause", 0.3, "seconds in which stores are given time"),
    ("dry-run", False, "say what would be run and how long it takes"),
)


def main() -> None:
    known = configurations(0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog="configurations: " + " ".join(known))
    parser.add_argument("names", nargs="+", choices=list(known), metavar="CONFIGURATION")
    for name, default, text in OPTIONS:
        kind: dict[str, Any] = {"action": "store_true"} if default is False else {"type": json.loads if isinstance(default, dict) else type(default)}
        parser.add_argument(f"--{name}", default=default, help=text, **kind)
    args = parser.parse_args()
    if args.dry_run:
        dry_run(args)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    args.kvd = args.kvd.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends, too
    run = Run(args)
    run.all()
    print((args.out / "table.md").read_text() if (args.out / "table.md").exists() else "nothing was run")
    print((args.out / "goals.md").read_text() if (args.out / "goals.md").exists() else "")
    failed = [name for name, engines in run.results.items() if "error" in engines or any(isinstance(f, dict) and "failed" in f for f in engines.values())]
    wrong = sorted({row[0] for row in goals.answers(run.results) if row[3] == "MISSED"})
    if failed or wrong:
        print(f"failed: {failed}; other answers or fewer hits: {wrong}")
        sys.exit(1)


if __name__ == "__main__":
    main()
