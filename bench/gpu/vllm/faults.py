"""Faults below kvd's connector: the daemon's memory is changed, its disk hangs, it is killed at a moment of the load that the connector in failing.py knows.

A folder is what both sides share: `fault` (what happens at the next load; removed when it happens), `pid` (of the daemon), `hanging` (while it exists the disk hangs),
`counters` (of the scheduler half), `worker` (of the rank; of several `worker0`, `worker1`, ...). Needs the standard library, and a C compiler for the disk."""

from __future__ import annotations

import json
import mmap
import os
import random
import subprocess
from pathlib import Path

FLIPS, LEASE, DEADLINE, KILL = "flips", "lease", "deadline", "kill"
FAULTS = (FLIPS, LEASE, DEADLINE, KILL)
EVERY = 65536


def flip(memory: mmap.mmap | bytearray, drawn: random.Random) -> int:
    """One bit in every 64 KiB, or, in every other one, a NaN of every type. Returns how many."""
    for i, at in enumerate(range(0, len(memory) - EVERY + 1, EVERY)):
        where = at + drawn.randrange(EVERY)
        if i % 2:
            memory[where & ~7 : (where & ~7) + 8] = b"\xff" * 8
        else:
            memory[where] ^= 1 << drawn.randrange(8)
    return len(memory) // EVERY


def flip_bits(pid: int, seed: int, memory: str = "kvd-slab") -> int:
    """In the daemon's slabs, through its own descriptors. `memory`: kvd-fake-gpu flips those of fake devices. Returns how many."""
    drawn, flipped = random.Random(seed), 0
    folder = f"/proc/{pid}/fd"
    slabs = {}
    for fd in os.listdir(folder):
        if f"memfd:{memory}" in os.readlink(f"{folder}/{fd}"):
            slabs[os.stat(f"{folder}/{fd}").st_ino] = f"{folder}/{fd}"
    for path in slabs.values():
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            flipped += flip(mapped, drawn)
    return flipped


def write(folder: Path, name: str, text: str) -> None:
    """A reader finds all of it or what was there before."""
    part = folder / f"{name}.{os.getpid()}"
    part.write_text(text)
    part.replace(folder / name)


def read(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text()
    except FileNotFoundError:
        return ""


def hanging_disk(folder: Path) -> dict[str, str]:
    """The environment of a daemon, with nvme.io_engine=threads, whose disk can hang."""
    library = folder / "hanging_disk.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(Path(__file__).with_name("hanging_disk.c")), "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "HANGING_DISK": str(folder / "hanging")}


def arm(folder: Path, fault: str, pid: int) -> None:
    write(folder, "pid", str(pid))
    if fault in (DEADLINE, KILL):
        write(folder, "hanging", "")
    write(folder, "fault", fault)


def disarm(folder: Path) -> bool:
    """The disk goes on. Whether the fault has happened."""
    (folder / "hanging").unlink(missing_ok=True)
    try:
        (folder / "fault").unlink()
    except FileNotFoundError:
        return True
    return False


def counters(folder: Path) -> dict[str, int]:
    """Of the scheduler half, since its start, and `ready`: attached."""
    return json.loads(read(folder, "counters") or "{}")


def attached(folder: Path, before: int) -> bool:
    """More than this many times, and now: what is asked from now on can be found."""
    found = counters(folder)
    return found.get("attaches", 0) > before and bool(found["ready"])
