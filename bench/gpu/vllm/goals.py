"""What was measured beside what is wanted: goals.py RESULTS.json ... prints the table, of all files together."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Iterator

HIT_MS = {"1030": 12.5, "10250": 30.0, "32780": 85.0}
RIVALS = ("native-v1", "native-v2", "lmcache-v1", "lmcache-v2", "lmserver-v1", "lmserver-v2")
OWN_HIT_MS, SAVING_PERCENT, TOGETHER, BESIDE, COST_MODEL_GOAL = 0.5, 0.5, 0.9, 2.0, 1.02

Row = tuple[str, str, str, str]  # what, measured, goal, verdict


def middle(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def verdict(met: bool | None) -> str:
    return "not run" if met is None else "met" if met else "MISSED"


def milliseconds(results: dict[str, Any], name: str, at: str, what: str) -> float | None:
    value = results.get(name, {}).get(at, {}).get(what)
    return value["ms"] if isinstance(value, dict) and "ms" in value else None


def best_rival(results: dict[str, Any], what: str) -> float | None:
    found = [ms for rival in RIVALS if (ms := milliseconds(results, rival, "first engine", what)) is not None]
    return min(found) if found else None


def sizes_of(results: dict[str, Any]) -> list[str]:
    """Lengths of prompts that were run, ascending."""
    names = {what.split()[1] for engines in results.values() for found in engines.values() if isinstance(found, dict) for what in found if what.startswith(("hit ", "cold "))}
    return sorted(names or set(HIT_MS), key=int)


def hits(results: dict[str, Any]) -> Iterator[Row]:
    for runner in ("v1", "v2"):
        for at in ("first engine", "engine restarted"):
            for n in sizes_of(results):
                ms, rival, goal = milliseconds(results, f"kvd-{runner}", at, f"hit {n}"), best_rival(results, f"hit {n}"), HIT_MS.get(n)
                whole = milliseconds(results, f"kvd-{runner}-whole", at, f"hit {n}")
                met = None if ms is None or goal is None else False if ms > goal else None if rival is None else ms <= rival
                limit = f"<= {goal:g} and best rival ({rival:g})" if goal and rival else "best rival not run" if goal else "-"
                yield f"hit {n}, {runner}, {at}", "" if ms is None else f"{ms:g} ms" + (f" (whole: {whole:g})" if whole else ""), limit, verdict(met)


def together(results: dict[str, Any]) -> Iterator[Row]:
    sizes = sizes_of(results)
    what = f"8 x {sizes[len(sizes) // 2]} hit"
    rival = best_rival(results, what)
    for runner in ("v1", "v2"):
        ms = milliseconds(results, f"kvd-{runner}", "first engine", what)
        mean = results.get(f"kvd-{runner}", {}).get("first engine", {}).get(what, {}).get("mean")
        met = None if ms is None or rival is None else ms <= TOGETHER * rival
        yield f"{what}, {runner}", "" if ms is None else f"{ms:g} ms" + (f", one {mean:g} on the average" if mean else ""), f"<= 0.9 x best rival ({rival:g})" if rival else "best rival not run", verdict(met)


def many(results: dict[str, Any]) -> Iterator[Row]:
    """Short hits by the dozen, and what one that generates notices of long ones."""
    for runner in ("v1", "v2"):
        found = results.get(f"kvd-{runner}", {}).get("first engine", {})
        burst = next((value for value in found.values() if isinstance(value, dict) and "rounds" in value), None)
        steady = next((value for what, value in found.items() if what.endswith("one that generates")), None)
        all_found = all(min(cached) > 0 for _, _, cached in burst["rounds"]) if burst else None
        yield f"short hits together, {runner}", f"{burst['ms']:g} ms, one {burst['mean']:g} on the average" if burst else "", "each time all found", verdict(all_found)
        text = f"{steady['beside']:g} ms from token to token ({steady['step']:g} alone), {steady['longest']:g} at the longest" if steady else ""
        yield f"beside long hits, {runner}", text, f"<= {BESIDE:g} x alone", verdict(steady["beside"] <= BESIDE * steady["step"] if steady else None)


def differences(ring: dict[str, Any], what: str, of: str) -> list[tuple[float, float]]:
    """(milliseconds, percent) more than without a connector, round by round."""
    rounds = [ring.get(member, {}).get(what, {}).get("rounds", []) for member in (of, "none")]
    return [(a - b, 100.0 * (a - b) / b) for a, b in zip(*rounds) if b]


def in_turns(results: dict[str, Any]) -> Iterator[Row]:
    for runner in ("v2", "v1"):
        ring = results.get(f"ring-{runner}", {})
        wanted = [f"gpu {n}" for n in sizes_of(results)] + [f"cold {n}" for n in sizes_of(results)]
        wanted += sorted({what for found in ring.values() if isinstance(found, dict) for what in found if " cold + " in what} | {"16 x 4096 cold + 32 tokens"}) + ["decode step, one request"]
        for what in wanted:
            found, idle = differences(ring, what, "kvd"), differences(ring, what, "nothing")
            which = 0 if what.startswith("gpu") else 1
            unit, goal = (("ms", OWN_HIT_MS), ("%", SAVING_PERCENT))[which]
            if not found:
                yield f"{what}, {runner}: beside no connector", "", f"<= +{goal:g} {unit}", verdict(None)
                continue
            values = [pair[which] for pair in found]
            text = f"{middle(values):+.2f} {unit} ({min(values):+.2f} .. {max(values):+.2f}, {len(values)} rounds)"
            text += f"; do-nothing {middle([pair[which] for pair in idle]):+.2f}" if idle else ""
            yield f"{what}, {runner}: beside no connector", text, f"<= +{goal:g} {unit}", verdict(middle(values) <= goal)


def disk_hits(results: dict[str, Any]) -> Iterator[Row]:
    for runner in ("v2", "v1"):
        for n in sizes_of(results):
            hit, cold = (milliseconds(results, f"disk-{runner}", "daemon restarted", f"{what} {n}") for what in ("hit", "fresh"))
            ratio = hit / cold if hit and cold else None
            yield f"from disk {n}, {runner}, cost model on", "" if ratio is None else f"{hit:g} ms, {ratio:.3f} of cold", f"<= {COST_MODEL_GOAL}", verdict(None if ratio is None else ratio <= COST_MODEL_GOAL)


def full(results: dict[str, Any]) -> Iterator[Row]:
    for runner in ("v1", "v2"):
        again = results.get(f"full-{runner}", {}).get("engine restarted")
        text = "" if again is None else f"up in {again.get('engine start s', '?')} s" if again.get("done") else f"failed: {again.get('failed')}"
        yield f"engine of 90 % of the memory after kill -9, {runner}", text, "starts at once", verdict(None if again is None else bool(again.get("done")))


def answers(results: dict[str, Any]) -> Iterator[Row]:
    for name in sorted(name for name in results if name.startswith("check")):
        for at, found in results[name].items():
            if isinstance(found, dict) and "same" in found:
                same = found["same"]
                yield f"{name}, {at}", f"{same['right']} of {same['of']}", "all equal, all found", verdict(same["right"] == same["of"] and not same["not all found"])


def recoveries(results: dict[str, Any]) -> Iterator[Row]:
    """Answers after loads that have failed (failed.py)."""
    for name in sorted(name for name in results if name.startswith("failed")):
        for found in results[name].values():
            for what, after in found.items() if isinstance(found, dict) else ():
                if what.startswith("after "):
                    tied = f", {after['tied']} by a tie" if after["tied"] else ""
                    text = f"{after['right']} of {after['of']}{tied}, {after['loads failed']} loads failed, in {after['asks with a failed load']} of {after['asks']} asks"
                    yield f"{name}, {what}", text, "all equal, a load failed", verdict(recovered(after))


def recovered(after: dict[str, Any]) -> bool:
    return after["right"] == after["of"] and after["loads failed"] > 0


def table(results: dict[str, Any]) -> str:
    rows = [row for part in (hits, together, many, in_turns, disk_hits, full, answers, recoveries) for row in part(results)]
    lines = ["| what | measured | goal | |", "|---|---|---|---|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows]) + "\n"


def main() -> None:
    results: dict[str, Any] = {}
    for path in sys.argv[1:]:
        results.update(json.loads(Path(path).read_text())["results"])
    print(table(results))


if __name__ == "__main__":
    main()
