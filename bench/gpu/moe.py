"""The experts' engine on GPUs (kve check, kve bench): moe.py --out DIR [ROW...] runs rows and writes a JSON object of the harness's form for each to DIR/moe.json."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable

HERE = Path(__file__).resolve().parent
MODEL = HERE / "qwen3-30b-a3b.json"
LAYERS = 8
PROMPT = 10240  # tokens that many requests begin with
CONTEXT = 2048  # mean tokens that a token sees, where the step is shorter

Json = dict[str, Any]


class Engine:
    def __init__(self, program: Path, gpus: int, rounds: int) -> None:
        self.program, self.gpus, self.rounds = program, gpus, rounds
        self.seen: dict[tuple[str, ...], Json] = {}

    def run(self, *arguments: str, program: str = "") -> subprocess.CompletedProcess[str]:
        """kve, or another program beside it."""
        return subprocess.run([str(self.program.with_name(program) if program else self.program), *arguments], capture_output=True, text=True, timeout=240)

    def bench(self, tokens: int, ranks: int, link: str = "peer", sequences: int = 1, context: int | None = None) -> Json:
        """Figures of a step; measured once."""
        before = max(0, CONTEXT - tokens // 2) if context is None else context
        arguments = (
            "bench", "--device", "gpu", "--config", str(MODEL), "--layers", str(LAYERS), "--data-parallel-size", str(ranks), "--gpus", str(min(ranks, self.gpus)),
            "--link", link, "--tokens", str(tokens), "--sequences", str(sequences), "--context", str(before), "--rounds", str(self.rounds), "--json", "true",
        )  # fmt: skip
        if arguments not in self.seen:
            ended = self.run(*arguments)
            found = [line for line in ended.stdout.splitlines() if line.startswith("{")]
            if ended.returncode != 0 or not found:
                raise RuntimeError(f"kve {' '.join(arguments)}: status {ended.returncode}: {ended.stderr.strip().splitlines()[-1:]}")
            self.seen[arguments] = json.loads(found[-1])
        return self.seen[arguments]


def row(name: str, value: float, unit: str, reference: str = "", reference_value: float | None = None, ratio: float | None = None, least: float | None = None) -> Json:
    found: Json = {"name": name, "value": round(value, 4), "unit": unit, "reference": reference}
    if reference_value is not None:
        found["reference_value"] = round(reference_value, 4)
    if ratio is not None:
        found["ratio"] = round(ratio, 4)
    if least is not None:
        found |= {"goal": f"ratio >= {least:g}", "goal_met": (value if ratio is None else ratio) >= least}
    return found


# ---- the rows -----------------------------------------------------------------------------------


def check(engine: Engine) -> list[Json]:
    """100 requests, all ways to compute them."""
    ended = engine.run("check", "--device", "gpu", "--gpus", str(engine.gpus), "--requests", "100")
    ways = [line for line in ended.stdout.splitlines() if "answers are" in line]
    equal = sum("100 of 100" in line for line in ways)
    name = f"one answer: ways to compute 100 requests that give the first one's bits ({engine.gpus} GPU)"
    return [row(name, equal, "ways", "all ways", len(ways), equal / len(ways) if ways and ended.returncode == 0 else 0, 1)]


def overlap(engine: Engine, link: str, tokens: int, least: float | None) -> list[Json]:
    f = engine.bench(tokens, 2, link)
    bound = max(f["dbo_compute_us"], f["dbo_transport_us"])
    what = f"{link}, {tokens:,} tokens a rank, {engine.gpus} GPU"
    found = [row(f"two microbatches: {what}", f["dbo_us"], "us a step", "one batch", f["seq_us"], f["seq_us"] / f["dbo_us"], least)]
    found.append(row(f"of the bound by its parts: {what}", f["dbo_us"], "us a step", "compute or transport of the halves, each alone", bound, bound / f["dbo_us"], 0.85 if least else None))
    found.append(row(f"transport under the other microbatch's compute: {what}", f["hidden"], "of it", "", None, None, 0.8 if least else None))
    found.append(row(f"compute's phases with the transport under way: {what}", f["dbo_busy_us"], "us a step", "alone", f["dbo_compute_us"], f["dbo_compute_us"] / f["dbo_busy_us"], 0.95 if least else 0.92))
    return found


def host(engine: Engine) -> list[Json]:
    return [line for tokens, least in ((2048, 1.30), (4096, 1.35 if engine.gpus > 1 else 1.30)) for line in overlap(engine, "host", tokens, least)]


def peer(engine: Engine) -> list[Json]:
    return [line for tokens in (2048, 4096) for line in overlap(engine, "peer", tokens, None)]


def decode(engine: Engine) -> list[Json]:
    f = engine.bench(128, 2, "peer", sequences=128, context=1024)
    return [row(f"two microbatches: decode of 128 sequences a rank, peer, {engine.gpus} GPU", f["dbo_us"], "us a step", "one batch", f["seq_us"], f["seq_us"] / f["dbo_us"])]


def whole(engine: Engine) -> list[Json]:
    """One rank: the step against its phases."""
    f = engine.bench(4096, 1, context=0)
    parts = f["seq_compute_us"] + f["seq_transport_us"]
    return [row("one rank, 4,096 tokens: a step against its phases, each alone", f["seq_us"], "us", "their sum", parts, parts / f["seq_us"], 0.9)]


def prefill(engine: Engine) -> list[Json]:
    """Tokens a second of two ranks, each on its own GPU, against one."""
    one, two = engine.bench(4096, 1, context=0), engine.bench(4096, 2, "peer", context=0)
    rates = [tokens / f["seq_us"] for tokens, f in ((4096, one), (8192, two))]
    return [row("experts over two GPUs: prefill of 4,096 tokens a rank", rates[1], "tokens a us", "one GPU", rates[0], rates[1] / rates[0], 1.85)]


# Bytes that are copied to the GPU, again and again, from pinned memory: GB/s.
LINK = """import torch
a, b = torch.empty(1 << 28, dtype=torch.uint8).pin_memory(), torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
t = [torch.cuda.Event(enable_timing=True) for _ in range(12)]
for event in t: b.copy_(a, non_blocking=True); event.record()
torch.cuda.synchronize()
print((1 << 28) / 1e6 / sorted(x.elapsed_time(y) for x, y in zip(t, t[1:]))[5])"""


def chat(engine: Engine, folder: Path, phase: str) -> list[Json]:
    """Requests of an engine that has just been started, one after the other, with one beginning."""
    log = folder / f"{phase}.log"
    ended = engine.run(
        "--socket", str(folder / "run/default.sock"), "--config", str(folder / "config.json"), "--bf16", "gpu", "--users", "9", "--branches", "0", "--turns", "1", "--systems", "1",
        "--system-tokens", str(PROMPT), "--message-tokens", "32", "--new-tokens", "2", "--phase", phase, "--log", str(log), program="kve-chat",
    )  # fmt: skip
    if ended.returncode != 0:
        raise RuntimeError(f"kve-chat: status {ended.returncode}: {ended.stderr.strip().splitlines()[-1:]}")
    return [json.loads(line) for line in log.read_text().splitlines()]


def warm(engine: Engine) -> list[Json]:
    """The first token after a restart of the engine, from kvd: the load at the link's rate, and what the rest takes."""
    link = subprocess.run([sys.executable, "-c", LINK], capture_output=True, text=True, timeout=100)
    if link.returncode != 0:
        print("warm: skipped: the link's rate is measured with torch, which does not run here", flush=True)
        return []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = json.loads(MODEL.read_text()) | {"num_hidden_layers": LAYERS, "max_position_embeddings": 2 * PROMPT}
        (folder / "config.json").write_text(json.dumps(model))
        with (folder / "kvd.log").open("w") as log:
            options = ["--cpu.size=4GiB", "--cpu.slab_size=256MiB", "--cpu.ahead=all", "--http.listen=off", "--keeper=off"]
            daemon = subprocess.Popen([str(engine.program.with_name("kvd")), f"--run_dir={folder / 'run'}", *options], stdout=log, stderr=log)
        try:
            end = time.monotonic() + 30
            while not (folder / "run/default.sock").exists() and daemon.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
            cold, again = chat(engine, folder, "cold"), chat(engine, folder, "warm")
        finally:
            daemon.terminate()
            daemon.wait()
    found = [answer for answer in again if answer["cpu_tokens"] >= PROMPT]
    if len(found) < len(again) or [a["answer"] for a in cold] != [a["answer"] for a in again]:
        raise RuntimeError(f"{len(found)} of {len(again)} prompts were found, or answers differ")
    first_us = statistics.median(answer["ttft_ns"] for answer in found) / 1e3
    bytes_a_token = 2 * 2 * model["num_key_value_heads"] * model["head_dim"] * LAYERS
    floor_us = found[0]["cpu_tokens"] * bytes_a_token / float(link.stdout) / 1e3
    own_us = engine.bench(32, 1, context=PROMPT)["seq_us"]
    name = f"first token of {PROMPT:,} tokens from kvd after a restart, computed in {cold[0]['ttft_ns'] / 1e6:.1f} ms"
    return [row(name, first_us, "us", "the load at the link's rate, and 1.3 steps of the rest", floor_us + 1.3 * own_us, (floor_us + 1.3 * own_us) / first_us, 1)]


ROWS: dict[str, Callable[[Engine], list[Json]]] = {"check": check, "whole": whole, "host": host, "peer": peer, "decode": decode, "warm": warm, "prefill": prefill}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; all that this machine can run")
    parser.add_argument("--kve", type=Path, required=True, help="the program")
    parser.add_argument("--gpus", type=int, required=True, help="that the ranks are spread over")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder of moe.json")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    unknown = set(args.rows) - set(ROWS)
    if unknown:
        parser.error(f"no row is called {', '.join(sorted(unknown))}")
    if args.gpus == 0:
        print("moe.py: skipped: there is no GPU")
        return 77
    engine = Engine(args.kve.resolve(), args.gpus, args.rounds)
    failed = False
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "moe.json").open("w") as out:
        for name in args.rows or [name for name in ROWS if name != "prefill" or args.gpus > 1]:
            try:
                for line in ROWS[name](engine):
                    verdict = {True: "met", False: "MISSED"}.get(line.get("goal_met"), "")
                    print(f"{line['name']:92s} {line['value']:>10g} {line['unit']:10s} {line.get('ratio', ''):>7}  {line.get('goal', ''):14s} {verdict}", flush=True)
                    out.write(json.dumps(line, separators=(",", ":")) + "\n")
            except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                failed = True
                print(f"{name}: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
