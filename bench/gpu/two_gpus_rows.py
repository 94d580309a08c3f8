"""What a second GPU is needed for: the rows, the command of each, and how its result files become lines of the table."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable

sys.path.insert(0, str(Path(__file__).resolve().parent / "vllm"))

import goals  # noqa: E402
from configurations import COMPILE  # noqa: E402

Json = dict[str, Any]
VLLM = "bench/gpu/vllm/run.sh"
TIMED = "--graph --pool-gib 30 --caution 0"
HANDED_OVER = TIMED + """ --sizes '{{"10250": 20, "32780": 20}}'"""  # braces of str.format
CHECKED = "--shape llama1b --pool-gib 30 --caution 0"


@dataclass(frozen=True)
class Line:
    """Of the table. `verdict`: met, MISSED, reported (there is no goal), not run, failed or skipped, with the reason."""

    what: str
    measured: str = ""
    reference: str = ""
    ratio: float | None = None
    goal: str = ""
    verdict: str = "reported"


@dataclass(frozen=True)
class Row:
    """command: {out} is the folder of its results. No command: `lacks` says why."""

    name: str
    what: str
    seconds: int = 0
    command: str = ""
    lines: Callable[[Path], list[Line]] = lambda out: []
    needs: tuple[str, ...] = ()
    lacks: str = ""

    def about(self, compiled: bool) -> int:
        return self.seconds + (COMPILE if "--graph" in self.command and not compiled else 0)


# ---- result files to lines ----------------------------------------------------------------------


def results_of(out: Path) -> Json:
    path = out / "results.json"
    return json.loads(path.read_text())["results"] if path.exists() else {}


def rates(path: Path) -> list[Json]:
    """A program of the harness writes one JSON object a line."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")] if path.exists() else []


def harness(name: str, wanted: Callable[[Json], bool]) -> Callable[[Path], list[Line]]:
    def lines(out: Path) -> list[Line]:
        found = []
        for row in filter(wanted, rates(out / f"{name}.json")):
            unit = row["unit"]
            reference = f"{row['reference_value']:.4g} {unit}: {row['reference']}" if row.get("reference") else ""
            met = goals.verdict(row["goal_met"]) if "goal" in row else "reported"
            found.append(Line(row["name"], f"{row['value']:.4g} {unit}", reference, row.get("ratio"), row.get("goal", ""), met))
        return found

    return lines


def judged(part: Callable[[Json], Iterable[goals.Row]], results: Json) -> dict[str, goals.Row]:
    return {row[0]: row for row in part(results)}


def spread(values: list[float]) -> str:
    return f"{min(values):g} to {max(values):g}, {len(values)} rounds"


def handed_over(out: Path) -> list[Line]:
    """From P's last step to D's first token."""
    results, lines = results_of(out), []
    rows = judged(goals.pairs_and_own_hits, results)
    for runner in goals.RUNNERS:
        found = results.get(f"pd-{runner}-hbm", {}).get("decode", {})
        for n in sorted({what.split()[-1] for what in found if what.startswith("pd own hit ")}, key=int):
            own = found[f"pd own hit {n}"]["ms"]
            for way in goals.PAIR:
                handed, host = found.get(f"pd {way} {n}"), found.get(f"pd {way} in host memory {n}", {}).get("ms")
                _, text, goal, met = rows[f"handed over {way} in GPU memory, {n}, {runner}: behind own hit"]
                if handed:
                    measured = f"{handed['ms']:g} ms ({spread(handed['each'])}); {text}"
                    reference = f"own hit {own:g} ms" + (f"; in host memory {host:g} ms" if host else "; GPU memory was not used")
                    met = met if host else "MISSED"
                    lines.append(Line(f"P to D of {n} tokens, {way}, {runner}", measured, reference, round(handed["ms"] / own, 3), goal, met))
    return lines


def peers(out: Path) -> list[Line]:
    results, lines = results_of(out), []
    for name, (_, text, goal, met) in judged(goals.other_gpu, results).items():
        n, runner = name.split(", ")[1:]
        found = results.get(f"peers-{runner}-hbm", {}).get("second", {}).get(f"found in another GPU, {n}")
        if found:
            own = f"own hit {found['own']:g} ms" if "own" in found else ""
            lines.append(Line(f"hit in another engine's GPU of {n} tokens, {runner}", text, own, found.get("ratio"), goal, met))
    return lines


def pushes(out: Path) -> list[Line]:
    results, lines = results_of(out), []
    for name, (_, text, goal, met) in judged(goals.pushing, results).items():
        runner = name.split(", ")[-1]
        found = results.get(f"push-{runner}-hbm", {}).get("decode", {})
        if name.startswith("prefill"):
            n = name.split(", ")[1]
            handed, alone = (found.get(f"prefill {way} {n}") for way in ("handed over", "alone"))
            ratio = round(goals.middle([a / b for a, b in zip(handed["each"], alone["each"])]), 4) if handed and alone else None
            reference = f"{alone['ms']:g} ms alone" if alone else ""
        else:
            rounds = next((value["rounds"] for what, value in found.items() if what.startswith("beside ")), [])
            ratio = round(goals.middle([one["beside"] / one["alone"] for one in rounds]), 4) if rounds else None
            reference = f"{goals.middle([one['alone'] for one in rounds]):g} ms alone" if rounds else ""
        if ratio is not None:
            lines.append(Line(name, text, reference, ratio, goal, met))
    return lines


def answers(out: Path) -> list[Line]:
    return [Line(name, text, "an engine without a connector", None, goal, met) for name, text, goal, met in goals.answers(results_of(out))]


def kills(out: Path) -> list[Line]:
    """The last line of each kill loop: of a control, in which a wrong byte must be noticed, and of the kills."""
    log = out / "log"
    ends = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("gpu_kill: seed") and " kills in " in line] if log.exists() else []
    found = []
    for line in ends:
        text, _, word = line.removeprefix("gpu_kill: ").rpartition(": ")
        what = "a control, in which one worker lies" if "a control" in line else "kill -9 of daemon and engines on a GPU"
        found.append(Line(what, text, "", None, "no wrong byte, all memory back", "met" if word == "good" else "MISSED"))
    return found


def deaths(out: Path) -> list[Line]:
    """The last line of gpu_ep_kill."""
    log = out / "log"
    ends = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("gpu_ep_kill: ") and " ranks in processes " in line] if log.exists() else []
    found = []
    for line in ends[-1:]:
        text, _, word = line.removeprefix("gpu_ep_kill: ").rpartition(": ")
        found.append(Line("a rank's process is killed or stands still", text, "", None, "the other one names it within 1.5 x the deadline, lives, and all memory is back", "met" if word == "good" else "MISSED"))
    return found


# ---- the rows, the most valuable first ----------------------------------------------------------

GPU, MODEL = ("two GPUs", "nvcc"), ("two GPUs", "vLLM", "kvd")
PD = "P to D of 10,250 / 32,780 tokens in GPU memory, at once / one after the other"


def of_runner(runner: int) -> list[Row]:
    v = f"v{runner}"
    return [
        Row(f"pd-{v}-6", f"{PD}, tier of 6 GiB, runner V{runner}", 135, f"{VLLM} pd-{v}-hbm {HANDED_OVER} --gpu-gib 6", handed_over, MODEL),
        Row(f"peers-{v}", f"hits in another engine's GPU, runner V{runner}", 95, f"{VLLM} peers-{v}-hbm {TIMED}", peers, MODEL),
        Row(f"push-{v}", f"prefill slowed by pushing; decode beside it, runner V{runner}", 95, f"{VLLM} push-{v}-hbm {TIMED}", pushes, MODEL),
        Row(f"pd-{v}-20", f"{PD}, tier of 20 GiB, runner V{runner}", 135, f"{VLLM} pd-{v}-hbm {HANDED_OVER} --gpu-gib 20", handed_over, MODEL),
    ]


def moe(name: str, what: str, seconds: int, rows: str) -> Row:
    """Rows of moe.py."""
    return Row(name, what, seconds, f"env MOE_ROWS='{rows}' bench/gpu/run.sh moe_engine {{out}}", harness("moe", lambda row: True), ("two GPUs", "kvd"))


def checks(runner: int) -> list[Row]:
    v = f"v{runner}"
    return [
        Row(f"check-pd-{v}", f"answers of hand-overs in GPU memory, runner V{runner}", 115, f"{VLLM} check-{v}-pd-hbm {CHECKED}", answers, MODEL),
        Row(f"check-peers-{v}", f"answers of hits in another engine's GPU, runner V{runner}", 125, f"{VLLM} check-{v}-peers-hbm {CHECKED}", answers, MODEL),
    ]


ROWS = [
    Row("probe", "peer access, link one way and both ways, host link of each GPU and of both, flag", 20, "bench/gpu/run.sh probe {out}", harness("probe", lambda row: True), GPU),
    *of_runner(2),
    Row("copies", "copies with another layout from and to a peer's memory, also mapped as the GPU tier's", 60, "bench/gpu/run.sh peer {out}", harness("peer", lambda row: "goal" in row and "this GPU" not in row["name"]), GPU),
    *checks(2),
    *of_runner(1),
    Row("check-pd-tp", "answers of two ranks to one, and of one to two", 215, f"{VLLM} check-v2-pd-tp2to1 check-v2-pd-tp1to2 {CHECKED}", answers, MODEL),
    *checks(1),
    Row("kill", "300 kills of daemon and engines with blocks in GPU memory", 230, "bench/gpu/run.sh kill {out}", kills, ("two GPUs", "nvcc", "kvd")),
    Row("two-nodes", "two nodes as two network namespaces, each with a GPU: P to D over TLS", lacks="no bench starts real engines at two daemons (bench.py has one daemon, scripts/demo_pd.sh engines without a GPU)"),
    Row("ep-check", "correctness of the MoE slice on real peers: deaths and stops of a rank's process", 300, "bench/gpu/run.sh ep_kill {out}", deaths, GPU),
    Row("ep-nvlink", "dispatch + combine over NVLink, H 2,048 and 7,168, 8 and 16 SMs, 4,096 tokens; the twin's bytes on real peers", 45, "bench/gpu/run.sh ep {out}", harness("ep", lambda row: True), GPU),
    Row("ep-nccl", "torch + NCCL all_to_all_single, rank-de-duplicated, same dtype, 128 / 4,096 tokens", 90, "bench/gpu/run.sh nccl {out}", harness("nccl", lambda row: "goal" in row), GPU),
    moe("dbo-host", "DBO over `host` (a link a GPU), 8 layers, prefill 2,048 / 4,096 tokens a rank", 25, "check host"),
    moe("dbo-nvlink", "DBO over NVLink (bound 1.00 / 1.05), and decode", 25, "peer decode"),
    moe("ep-prefill", "EP over two GPUs, 8 layers, prefill", 20, "prefill"),
]
