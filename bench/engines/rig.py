"""Engines of every kind beside each other, and the lines that say what was measured."""
from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from typing import Any, Sequence

import harness
from harness import Answer, Bench, Daemon, Engine, Failed
from models import FIRST_TOKEN, VOCAB

KINDS = ("none", "example", "naive", "kvd")
# Engines of all kinds: without huge pages two processes of the same kind differ by up to a fifth, by where their memory happens to lie.
# The same cores for all: by default vLLM reserves one, and one more with a connector. Two of two reserved leaves none, and then it takes both.
ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}
PAUSE_S = 0.1  # between two measurements: threads of the last one go to sleep


def spread(values: Sequence[float]) -> float:
    """Interquartile range over the median."""
    if len(values) < 3 or not statistics.median(values):
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / statistics.median(values)


class Rig:
    def __init__(self, bench: Bench, args: argparse.Namespace) -> None:
        self.bench, self.args = bench, args
        self.random = random.Random(args.seed)
        self.engines: dict[str, Engine] = {}
        self.daemon: Daemon | None = None
        self.pool: dict[str, str] = {}  # options of the daemon that differ
        self.options: dict[str, Any] = {}

    # What is measured

    def start(self, kinds: Sequence[str], **options: Any) -> None:
        """An engine of every kind; those with a connector keep what was stored before."""
        self.options = dict(mp=self.args.mp, max_num_seqs=8, environment=ENVIRONMENT) | options
        for kind in kinds:
            self.restart(kind)

    def restart(self, kind: str) -> None:
        if kind in self.engines:
            self.engines.pop(kind).kill()
        engine = self.bench.engine(self.args.model, self.connector(kind), **self.options)
        self.engines[kind] = engine
        for tokens in (33, 700, 2000):  # the first prefills of a process are slow
            engine.generate([self.prompt(min(tokens, engine.spec["options"]["max_model_len"] - 40))], 3)
        engine.reset()

    def connector(self, kind: str) -> dict[str, Any] | None:
        if kind == "none":
            return None
        if kind == "kvd":
            if not self.daemon:
                disk = self.bench.folder("disk")
                options = {"cpu.size": "2GiB", "cpu.slab_size": "64MiB", "nvme.path": str(disk), "nvme.size": "6GiB"} | self.pool
                self.daemon = self.bench.daemon(**options)
            return harness.connector("KvdConnector", "kvd_vllm.connector", dict(socket=str(self.daemon.socket)))
        path = self.bench.path / kind if kind == "example" else harness.pathlib.Path("/dev/shm") / f"{self.bench.path.name}-{kind}"
        path.mkdir(exist_ok=True)
        self.bench.folders.append(path)
        return harness.example(path) if kind == "example" else harness.naive(path)

    def fresh(self) -> None:
        """The next family starts with nothing."""
        for engine in self.engines.values():
            engine.kill()
        self.engines = {}
        if self.daemon:
            self.daemon.kill()
        self.daemon = None

    def prompt(self, tokens: int) -> list[int]:
        return [self.random.randrange(FIRST_TOKEN, VOCAB) for _ in range(tokens)]

    def first_token(self, kind: str, prompt: list[int], tokens: int = 2, params: dict[str, Any] | None = None) -> Answer:
        time.sleep(PAUSE_S)
        return self.engines[kind].generate([prompt], tokens, params=params)[0]

    def settle(self) -> None:
        """Until kvd has everything in memory and on disk."""
        if not self.daemon:
            return
        daemon, last, since = self.daemon, (-1.0, -1.0), time.monotonic()
        end = since + 60
        while time.monotonic() < min(end, since + 0.5):
            stats = daemon.stats()
            now = (stats["kvd_put_blocks_total"], stats["kvd_write_behind_total"])
            if stats["kvd_puts"] or now != last:
                last, since = now, time.monotonic()
            time.sleep(0.05)

    # What is said about it

    def line(self, family: str, name: str, kind: str, values: Sequence[float], unit: str, **more: Any) -> None:
        out = dict(family=family, name=name, kind=kind, value=round(statistics.median(values), 6), unit=unit, rounds=len(values),
                   spread=round(spread(values), 4), least=round(min(values), 6), most=round(max(values), 6), load=round(os.getloadavg()[0], 2)) | more
        self.write(out)

    def skipped(self, family: str, kind: str, reason: str) -> None:
        self.write(dict(family=family, kind=kind, skipped=reason))

    def write(self, out: dict[str, Any]) -> None:
        text = json.dumps(out)
        print(text, flush=True)
        if self.args.out:
            with open(self.args.out, "a") as f:
                f.write(text + "\n")


def must_cache(kind: str, what: str, answer: Answer, tokens: int) -> None:
    """A figure for something that did not happen is worth nothing."""
    if (answer.cached or 0) < 0.9 * tokens:
        raise Failed(f"{what}, {kind}: only {answer.cached} of {tokens} prompt tokens came from a cache")
