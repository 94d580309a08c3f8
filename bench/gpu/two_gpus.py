"""Runs what needs two GPUs, in a limited time, and makes one JSON and one table of it: scripts/gpu-x2. A row that has run on this machine is kept."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from two_gpus_rows import ROWS, Line, Row, results_of, rates

from configurations import TWO_GPUS

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "gpu-x2"
PROGRAMS = Path(os.environ.get("BUILD") or ROOT / "build" / "gpu")
BUILD_S = 40  # of run.sh build, about
END_S = 15  # in which a row that is told to end has ended
OUT_OF_TIME = "out of time"
Json = dict[str, Any]


def said_by(*command: str) -> str:
    """What a command prints, empty when it fails or there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def gpus_of_driver() -> list[str]:
    """Where there is no nvidia-smi."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return [", ".join(line.partition(":")[2].strip() for line in file.read_text().splitlines() if line.startswith(("Model", "GPU UUID"))) for file in files]


def bundle() -> Path | None:
    named = os.environ.get("BUNDLE")
    found = [Path(named)] if named else sorted((ROOT / ".gpu").glob("kvd-*.tar.xz"))
    return found[0] if found else None


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""


def xxhash_header(work: Path) -> Path | None:
    """Where the system has none: in .gpu, or out of a bundle with headers (scripts/offline-bundle --dev)."""
    found = [path for path in (ROOT / ".gpu" / "xxhash.h", work / "xxhash.h") if path.exists()]
    packed = bundle()
    if found or not packed or not packed.exists() or Path("/usr/include/xxhash.h").exists():
        return found[0] if found else None
    with tarfile.open(packed) as archive:
        member = next((member for member in archive if member.name.endswith("/include/xxhash.h")), None)
        text = archive.extractfile(member) if member else None
        if text:
            work.mkdir(parents=True, exist_ok=True)
            (work / "xxhash.h").write_bytes(text.read())
            return work / "xxhash.h"
    return None


class Machine:
    """What there is. `identity`: results of another machine or kvd do not belong in the same table."""

    def __init__(self) -> None:
        self.gpus = said_by("nvidia-smi", "--query-gpu=name,uuid,memory.total,driver_version", "--format=csv,noheader").splitlines() or gpus_of_driver()
        self.kvd = bundle() or ROOT / "build" / "release" / "bin" / "kvd"
        namespaces = subprocess.run(["unshare", "-rn", "true"], capture_output=True, text=True) if shutil.which("unshare") else None
        self.namespaces = "can be made" if namespaces and namespaces.returncode == 0 else f"cannot be made: {namespaces.stderr.strip() if namespaces else 'no unshare'}"
        nvcc = shutil.which("nvcc") or Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
        archives = [path for folder in ROOT.glob(".vllm[0-9]") for path in folder.glob("site.tar.xz.*")]
        self.lacks = {
            "two GPUs": "" if len(self.gpus) >= 2 else f"needs two GPUs, this machine has {len(self.gpus)}",
            "nvcc": "" if is_built() or Path(nvcc).exists() else "no nvcc, and the programs in build/gpu are not built",
            "kvd": "" if self.kvd.exists() else "no kvd: neither a build in build/release nor a bundle (BUNDLE, .gpu)",
            "vLLM": "" if archives or (Path.home() / "v" / "done").exists() or importlib.util.find_spec("vllm") else "no vLLM: neither this Python's nor an archive (.vllm1)",
        }
        self.identity = hashlib.sha256("\n".join([*self.gpus, checksum(self.kvd)]).encode()).hexdigest()[:16]

    def facts(self) -> Json:
        shared = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
        return {
            "gpus": self.gpus,
            "links": said_by("nvidia-smi", "topo", "-m"),
            "network namespaces": self.namespaces,
            "huge pages of shared memory": shared.read_text().strip() if shared.exists() else "",
            "kvd": {"file": str(self.kvd), "sha256": checksum(self.kvd), "commit": said_by("git", "rev-parse", "HEAD")},
            "lacks": {name: why for name, why in self.lacks.items() if why},
        }


def is_built() -> bool:
    return all(os.access(PROGRAMS / name, os.X_OK) for name in ("gpu_copy", "gpu_probe", "gpu_ep", "gpu_ep_kill", "gpu_nn"))


def missing_code(row: Row) -> str:
    """Why it runs on no machine yet; empty: it does."""
    return "" if row.command else row.lacks or "its command is missing in bench/gpu/two_gpus_rows.py"


def why_no_result(log: Path) -> str:
    """A program that cannot run here says so, and is no failure."""
    skipped = [line.partition("skipped: ")[2] for line in log.read_text(errors="replace").splitlines() if "skipped: " in line] if log.exists() else []
    return f"skipped: {skipped[0]}" if skipped else "failed: it left no result"


class Report:
    """Of all rows, those of earlier calls included."""

    def __init__(self, machine: Machine, work: Path, out: Path) -> None:
        self.machine, self.work, self.out = machine, work, out
        self.not_run: dict[str, str] = {}

    def ran(self, row: Row) -> Json:
        try:
            found = json.loads((self.work / row.name / "row.json").read_text())
        except (OSError, ValueError):
            return {}
        return found if found["machine"] == self.machine.identity else {}

    def is_due(self, row: Row) -> bool:
        return self.ran(row).get("status", OUT_OF_TIME) == OUT_OF_TIME

    def lines(self, row: Row) -> list[Line]:
        ran, missing = self.ran(row), missing_code(row)
        if missing or not ran:
            return [Line(row.what, verdict=f"skipped: {missing}" if missing else f"not run: {self.not_run.get(row.name, 'not asked for')}")]
        lines = row.lines(self.work / row.name)
        if ran["status"] != "ended" and all(line.verdict != "MISSED" for line in lines):
            return [*lines, Line(row.what, verdict=f"failed: {ran['status']}")]
        return lines or [Line(row.what, verdict=why_no_result(self.work / row.name / "log"))]

    def write(self) -> str:
        rows, table = [], ["| row | measured | reference | ratio | goal | met or missed |", "|---|---|---|---|---|---|"]
        for row in ROWS:
            lines = self.lines(row)
            folder = self.work / row.name
            results = results_of(folder) or {path.name: rates(path) for path in folder.glob("*.json") if path.name != "row.json"}
            ran = self.ran(row)
            rows.append({"row": row.name, "what": row.what, "ran": ran or None, "lines": [asdict(line) for line in lines], "results": results if ran else {}})
            for line in lines:
                ratio = "" if line.ratio is None else f"{line.ratio:g}"
                table.append(f"| {row.name}: {line.what} | {line.measured} | {line.reference} | {ratio} | {line.goal} | {line.verdict} |")
        self.out.mkdir(parents=True, exist_ok=True)
        made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        text = "\n".join(table) + "\n"
        (self.out / "gpu-x2.json").write_text(json.dumps({"made": made, "machine": self.machine.facts(), "rows": rows}, indent=1))
        (self.out / "gpu-x2.md").write_text(f"{'; '.join(self.machine.gpus) or 'no GPU'}; {made}\n\n{text}")
        return text


class Call:
    """One call: rows until the time is up."""

    def __init__(self, report: Report, seconds: float, vllm: str) -> None:
        self.report, self.machine, self.vllm = report, report.machine, vllm
        self.end = time.monotonic() + seconds
        report.out.mkdir(parents=True, exist_ok=True)
        self.log = (report.out / "gpu-x2.log").open("a")

    def left(self) -> int:
        return int(self.end - time.monotonic())

    def say(self, text: str) -> None:
        print(text, flush=True)
        self.log.write(text + "\n")
        self.log.flush()

    def environment(self, out: Path) -> dict[str, str]:
        found = {**os.environ, **TWO_GPUS, "OUT": str(out), "SECONDS_A_PART": str(self.left() - END_S), "PYTHONUNBUFFERED": "1"}
        header = xxhash_header(self.report.work)
        return found | ({"XXHASH_INCLUDE": str(header.parent)} if header and "XXHASH_INCLUDE" not in found else {})

    def command(self, command: str, out: Path) -> str:
        """Runs it, until it ends or the time is up: "ended", or why not. What it says is in its log and, the end of it, in this call's."""
        out.mkdir(parents=True, exist_ok=True)
        log = out / "log"
        with log.open("wb") as file:
            child = subprocess.Popen(["bash", *shlex.split(command)], cwd=ROOT, env=self.environment(out), stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                status = child.wait(max(1, self.left() - END_S))
            except subprocess.TimeoutExpired:
                status = None
            finally:
                end_group(child)
        self.log.write(f"==== {command}\n{log.read_text(errors='replace')[-20000:]}\n")
        self.log.flush()
        return "ended" if status == 0 else OUT_OF_TIME if status is None else f"status {status}, its log ends with: {last_line(log)}"

    def build(self) -> None:
        if not is_built():
            self.say(f"builds the GPU programs: {self.command('bench/gpu/run.sh build', self.report.work / 'build')}")

    def row(self, row: Row) -> None:
        out = self.report.work / row.name
        shutil.rmtree(out, ignore_errors=True)
        began, at = time.monotonic(), time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        command = row.command.format(out=out)
        if row.command.startswith("bench/gpu/vllm"):
            command += f" --seconds {self.left() - 2 * END_S} {self.vllm}".rstrip()
        self.say(f"{row.name}: {command}")
        status = self.command(command, out)
        ran = {"status": status, "seconds": round(time.monotonic() - began, 1), "at": at, "command": command, "machine": self.machine.identity}
        (out / "row.json").write_text(json.dumps(ran))
        self.say(f"{row.name}: {status}, {ran['seconds']:g} s")

    def rows(self, rows: list[Row]) -> None:
        for row in rows:
            why = next((self.machine.lacks[need] for need in row.needs if self.machine.lacks[need]), "")
            if not why and "nvcc" in row.needs:
                self.build()
                why = "" if is_built() else "the GPU programs do not build (gpu-x2.log)"
            compiled = any(self.report.ran(other) for other in ROWS if "--graph" in other.command)
            about = row.about(compiled)
            if not why and about > self.left() - 2 * END_S:
                why = f"no time left: it takes about {about} s, there are {self.left() - 2 * END_S}"
            if why:
                self.report.not_run[row.name] = why
                self.say(f"{row.name}: not run: {why}")
                continue
            self.row(row)
            self.report.write()


def end_group(child: subprocess.Popen) -> None:
    """SIGTERM first: bench.py ends engines and daemon, which have groups of their own."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, sent)
            child.wait(END_S - 3)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def last_line(log: Path) -> str:
    said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return said[-1][:200].replace("|", "/") if said else "nothing"


def calls(rows: list[Row], seconds: float) -> list[list[str]]:
    """Which rows each call would run, one call after another."""
    planned: list[list[str]] = []
    left, compiled, waiting = 0.0, False, list(rows)
    while waiting:
        fit = next((row for row in waiting if row.about(compiled) <= left), None)
        if fit is None:
            if planned and not planned[-1]:
                break  # what waits fits in no call
            left = seconds - 2 * END_S - (0 if planned else BUILD_S)
            planned.append([])
            continue
        left -= fit.about(compiled)
        compiled = compiled or "--graph" in fit.command
        planned[-1].append(fit.name)
        waiting.remove(fit)
    return planned


def dry_run(machine: Machine, rows: list[Row], seconds: float) -> None:
    for what, why in machine.lacks.items():
        if why:
            print(f"{what}: {why}")
    print(f"network namespaces: {machine.namespaces}")
    for row in rows:
        missing = missing_code(row)
        print(f"{row.name:16s} {'skipped: ' + missing if missing else f'runs, about {row.seconds} s'}: {row.what}")
    for number, names in enumerate(calls([row for row in rows if not missing_code(row)], seconds), 1):
        print(f"call {number} of {seconds:g} s: {', '.join(names)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="", help="NAME[,NAME]: these, in this order, whether they have run or not")
    parser.add_argument("--seconds", type=float, default=540.0, help="in which the call ends (540)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or WORK), help="of gpu-x2.json, gpu-x2.md and gpu-x2.log ($OUT)")
    parser.add_argument("--work", type=Path, default=WORK / "rows", help="results of each row, kept from call to call")
    parser.add_argument("--vllm", default="", help="more options of bench/gpu/vllm/bench.py")
    parser.add_argument("--again", action="store_true", help="rows that have run, too")
    parser.add_argument("--report", action="store_true", help="run nothing: the table of what has run")
    parser.add_argument("--dry-run", action="store_true", help="say what would run, and about how long it takes")
    args = parser.parse_args()
    known = {row.name: row for row in ROWS}
    names = [name for name in args.rows.split(",") if name]
    if set(names) - set(known):
        parser.error(f"no row is called {', '.join(sorted(set(names) - set(known)))}: {', '.join(known)}")
    rows = [known[name] for name in names] or ROWS
    machine = Machine()
    if args.dry_run:
        dry_run(machine, rows, args.seconds)
        return 0
    report = Report(machine, args.work.resolve(), args.out.resolve())
    if not args.report:
        Call(report, args.seconds, args.vllm).rows([row for row in rows if not missing_code(row) and (names or args.again or report.is_due(row))])
    print(report.write())
    verdicts = [line.verdict for row in rows for line in report.lines(row)]
    return 1 if any(verdict == "MISSED" or verdict.startswith("failed") for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
