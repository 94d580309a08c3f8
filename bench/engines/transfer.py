"""A prefix from one process to another over TCP on loopback: by NIXL with the UCX of its wheel, by two daemons of kvd, and by ucx_perftest, in turn."""
from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import pathlib
import signal
import statistics
import subprocess
import time
from multiprocessing.connection import Connection
from typing import Any

from harness import BUILD, Failed, Skipped
from rig import Rig, spread

BYTES = 256 << 20
BLOCKS = {"2m": 2 << 20, "256k": 256 << 10}
REGIONS = 3  # that the destination takes in turn: what it writes to is in no cache
UCX = dict(UCX_TLS="tcp", UCX_NET_DEVICES="lo", UCX_WARN_UNUSED_ENV_VARS="n", NIXL_LOG_LEVEL="WARN")  # as bench/transfer.c sets it; standard output is ours
PAUSE_S = 0.0001  # between two looks: the thread of UCX needs the processor
LIMIT_S = 60.0


def ucx_version(library: str) -> str:
    text = ctypes.CDLL(library).ucp_get_version_string
    text.restype = ctypes.c_char_p
    return str(text().decode())


class Side:
    """One of the two processes: an agent, and memory that it has registered."""

    def __init__(self, name: str, regions: int) -> None:
        import numpy
        from nixl._api import nixl_agent
        self.agent = nixl_agent(name)
        self.memory = numpy.ones((regions, BYTES), numpy.uint8)  # touched
        self.agent.register_memory([(self.memory.ctypes.data, self.memory.nbytes, 0, "")], "DRAM")
        self.peer, self.peer_at, self.numbers = "", 0, 0

    def describe(self) -> tuple[bytes, int, str]:
        maps = pathlib.Path("/proc/self/maps").read_text().split()
        return self.agent.get_agent_metadata(), self.memory.ctypes.data, ucx_version(next(word for word in maps if "libucp" in word))

    def meet(self, metadata: bytes, address: int) -> None:
        name = self.agent.add_remote_agent(metadata)
        self.peer, self.peer_at = name.decode() if isinstance(name, bytes) else name, address

    def draw(self, seed: int) -> None:
        import numpy
        self.memory[0] = numpy.frombuffer(numpy.random.default_rng(seed).bytes(BYTES), numpy.uint8)

    def clear(self, region: int) -> None:
        self.memory[region] = 0

    def digest(self, region: int) -> str:
        import hashlib
        return hashlib.blake2b(self.memory[region]).hexdigest()

    def move(self, operation: str, mine: int, theirs: int, block: int) -> tuple[float, float]:
        """Region `mine` from or to region `theirs` of the other side, block by block, with a notification. When it began, and when it was done here."""
        began = time.monotonic()
        here, there = self.memory.ctypes.data + mine * BYTES, self.peer_at + theirs * BYTES
        descriptions = [self.agent.get_xfer_descs([(at + i, block, 0) for i in range(0, BYTES, block)], "DRAM") for at in (here, there)]
        handle = self.agent.initialize_xfer(operation, *descriptions, self.peer, b"done")
        state = self.agent.transfer(handle)
        while state == "PROC" and time.monotonic() < began + LIMIT_S:
            time.sleep(PAUSE_S)
            state = self.agent.check_xfer_state(handle)
        ended = time.monotonic()
        self.agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL {operation}: {state}")
        return began, ended

    def hear(self) -> float:
        """When the notification of the other side's transfer was here."""
        end = time.monotonic() + LIMIT_S
        while not self.agent.get_new_notifs():
            if time.monotonic() > end:
                raise RuntimeError("NIXL: no notification")
            time.sleep(PAUSE_S)
        return time.monotonic()


def serve(pipe: Connection, name: str, regions: int) -> None:
    """A process with a Side: calls come through the pipe, and answers go back."""
    os.environ.update(UCX)
    side = Side(name, regions)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(side, method)(*arguments))


class Pair:
    """The owner of a prefix, and the process that wants it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for name, regions in (("owner", 1), ("taker", REGIONS)):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, name, regions), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        described = [self.call(side, "describe") for side in (0, 1)]
        self.ucx = described[0][2]
        for side in (0, 1):
            self.call(side, "meet", *described[1 - side][:2])
        self.rounds = 0
        self.signal(signal.SIGSTOP)

    def send(self, side: int, method: str, *arguments: Any) -> None:
        self.pipes[side].send((method, arguments))

    def receive(self, side: int) -> Any:
        try:
            if self.pipes[side].poll(2 * LIMIT_S):
                return self.pipes[side].recv()
        except EOFError:
            pass
        raise Failed("a process with NIXL has ended, or hangs")

    def call(self, side: int, method: str, *arguments: Any) -> Any:
        self.send(side, method, *arguments)
        return self.receive(side)

    def move(self, operation: str, block: int) -> float:
        """GB/s of one transfer, until the taker knows that all is there."""
        self.signal(signal.SIGCONT)
        region = self.rounds % REGIONS
        self.rounds += 1
        self.call(0, "draw", self.rounds)
        self.call(1, "clear", (region + 1) % REGIONS)  # long before its turn: that leaves it in no cache
        mover, other = (1, 0) if operation == "READ" else (0, 1)
        self.send(other, "hear")
        began, ended = self.call(mover, "move", operation, *((region, 0) if mover == 1 else (0, region)), block)
        heard = self.receive(other)
        if self.call(0, "digest", 0) != self.call(1, "digest", region):
            raise Failed(f"NIXL {operation}: other bytes have come")
        self.signal(signal.SIGSTOP)
        return BYTES / 1e9 / ((ended if mover == 1 else heard) - began)

    def signal(self, number: int) -> None:
        """Stopped while others are measured: each has a thread of NIXL's that never sleeps."""
        for process in self.processes:
            os.kill(process.pid or 0, number)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def kvd_bench(name: str) -> tuple[float, float]:
    """GB/s of kvd, and of ucx_perftest; both have a round before that does not count."""
    done = subprocess.run([str(BUILD / "bin" / "kvd-bench"), f"transfer/ucx-{name}", "--json", "--rounds", "1"], capture_output=True, text=True)
    line = json.loads(done.stdout.splitlines()[-1])
    if "skipped" in line:
        raise Skipped(line["skipped"])
    if "value" not in line:
        raise Failed(line.get("failed", done.stderr))
    return float(line["value"]), float(line["reference_value"])


def run(rig: Rig) -> None:
    try:
        import nixl  # noqa: F401
    except ImportError:
        raise Skipped("there is no nixl in this Python (scripts/engines.sh --nixl installs it)") from None
    pair = Pair()
    try:
        for name, block in BLOCKS.items():
            blocks(rig, pair, name, block)
    finally:
        pair.end()


def blocks(rig: Rig, pair: Pair, name: str, block: int) -> None:
    kinds = ("kvd", "ucx_perftest", "nixl read", "nixl write")
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for i in range(-1, rig.args.rounds):  # the first one does not count
        found = {}
        for kind in rig.random.sample(["kvd", "nixl read", "nixl write"], 3):
            if kind == "kvd":
                found[kind], found["ucx_perftest"] = kvd_bench(name)
            else:
                found[kind] = pair.move(kind.split()[1].upper(), block)
        for kind, rate in found.items() if i >= 0 else ():
            rates[kind].append(rate)
    ours, theirs = ucx_version("libucp.so.0"), pair.ucx
    best = [max(both) for both in zip(rates["nixl read"], rates["nixl write"])]
    to_nixl = statistics.median(a / b for a, b in zip(rates["kvd"], best))
    for kind in kinds:
        ratios = [a / b for a, b in zip(rates[kind], rates["ucx_perftest"])]
        more = dict(to_nixl=round(to_nixl, 4), goal="ratio >= 0.9") if kind == "kvd" else {}
        rig.line("transfer", f"{BYTES >> 20} MiB in blocks of {name}", kind, rates[kind], "GB/s", ratio=round(statistics.median(ratios), 4),
                 ratio_spread=round(spread(ratios), 4), ucx=theirs if "nixl" in kind else ours, **more)
