"""What was measured beside what is wanted: goals.py RESULTS.json ... prints the table, of all files together."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Iterator

HIT_MS = {"1030": 12.5, "10250": 30.0, "32780": 85.0}
RIVALS = ("native-v1", "native-v2", "lmcache-v1", "lmcache-v2")
PAIR = {"at once": 15.0, "one after the other": 45.0}  # milliseconds, of prompts of the middle length
OWN_HIT_MS, SAVING_PERCENT, TOGETHER, BESIDE, COST_MODEL_GOAL = 0.5, 0.5, 0.9, 2.0, 1.02
ABOVE_OWN_HIT_MS, BLOCK = 3.0, 16  # of a hand-over in GPU memory; tokens of an engine's block
OTHER_GPU, PUSHING_PERCENT, BESIDE_PUSHES, BESIDE_PROMOTIONS = 1.5, 2.0, 1.03, 1.01
RUNNERS, BOTH = ("v1", "v2"), ("first engine", "engine restarted")

Row = tuple[str, str, str, str]  # what, measured, goal, verdict


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def verdict(met: bool | None) -> str:
    return "not run" if met is None else "met" if met else "MISSED"


def found_in(results: dict[str, Any], name: str, at: str, what: str) -> dict[str, Any]:
    value = results.get(name, {}).get(at, {}).get(what)
    return value if isinstance(value, dict) else {}


def best_rival(results: dict[str, Any], what: str) -> float | None:
    return min((ms for rival in RIVALS if (ms := found_in(results, rival, "first engine", what).get("ms")) is not None), default=None)


def sizes_of(results: dict[str, Any]) -> list[str]:
    """Lengths of prompts that were run, ascending."""
    names = {what.split()[1] for engines in results.values() for found in engines.values() if isinstance(found, dict) for what in found if what.startswith(("hit ", "cold "))}
    return sorted(names or set(HIT_MS), key=int)


def hits(results: dict[str, Any]) -> Iterator[Row]:
    for runner, at, n in ((runner, at, n) for runner in RUNNERS for at in BOTH for n in sizes_of(results)):
        ms, rival, goal = found_in(results, f"kvd-{runner}", at, f"hit {n}").get("ms"), best_rival(results, f"hit {n}"), HIT_MS.get(n)
        met = None if ms is None or goal is None else False if ms > goal else None if rival is None else ms <= rival
        limit = f"<= {goal:g} and best rival ({rival:g})" if goal and rival else "best rival not run" if goal else "-"
        yield f"hit {n}, {runner}, {at}", "" if ms is None else f"{ms:g} ms", limit, verdict(met)


def together(results: dict[str, Any]) -> Iterator[Row]:
    sizes = sizes_of(results)
    what = f"8 x {sizes[len(sizes) // 2]} hit"
    rival = best_rival(results, what)
    for runner in RUNNERS:
        found = found_in(results, f"kvd-{runner}", "first engine", what)
        text = f"{found['ms']:g} ms" + (f", one {found['mean']:g} on the average" if "mean" in found else "") if found else ""
        yield f"{what}, {runner}", text, f"<= 0.9 x best rival ({rival:g})" if rival else "best rival not run", verdict(found["ms"] <= TOGETHER * rival if found and rival else None)


def many(results: dict[str, Any]) -> Iterator[Row]:
    """Short hits by the dozen, and what one that generates notices of long ones."""
    for runner in RUNNERS:
        found = results.get(f"kvd-{runner}", {}).get("first engine", {})
        burst = next((value for value in found.values() if isinstance(value, dict) and "rounds" in value), None)
        steady = next((value for what, value in found.items() if what.endswith("one that generates")), None)
        all_found = all(min(cached) > 0 for _, _, cached in burst["rounds"]) if burst else None
        yield f"short hits together, {runner}", f"{burst['ms']:g} ms, one {burst['mean']:g} on the average" if burst else "", "each time all found", verdict(all_found)
        text = f"{steady['beside']:g} ms from token to token ({steady['step']:g} alone), {steady['longest']:g} at the longest" if steady else ""
        yield f"beside long hits, {runner}", text, f"<= {BESIDE:g} x alone", verdict(steady["beside"] <= BESIDE * steady["step"] if steady else None)


def in_turns(results: dict[str, Any]) -> Iterator[Row]:
    for runner in RUNNERS:
        ring = results.get(f"ring-{runner}", {})
        wanted = [f"{what} {n}" for what in ("gpu", "cold") for n in sizes_of(results)]
        wanted += sorted({what for found in ring.values() if isinstance(found, dict) for what in found if " cold + " in what} | {"16 x 4096 cold + 32 tokens"}) + ["decode step, one request"]
        for what in wanted:
            unit, goal = ("ms", OWN_HIT_MS) if what.startswith("gpu") else ("%", SAVING_PERCENT)
            kvd, nothing, none = (ring.get(member, {}).get(what, {}).get("rounds", []) for member in ("kvd", "nothing", "none"))
            more, idle = ([(a - b) * (1 if unit == "ms" else 100 / b) for a, b in zip(of, none) if b] for of in (kvd, nothing))  # than without a connector, round by round
            text = f"{middle(more):+.2f} {unit} ({min(more):+.2f} .. {max(more):+.2f}, {len(more)} rounds)" if more else ""
            text += f"; do-nothing {middle(idle):+.2f}" if more and idle else ""
            yield f"{what}, {runner}: beside no connector", text, f"<= +{goal:g} {unit}", verdict(middle(more) <= goal if more else None)


def disk_hits(results: dict[str, Any]) -> Iterator[Row]:
    for runner in RUNNERS:
        for n in sizes_of(results):
            hit, cold = (found_in(results, f"disk-{runner}", "daemon restarted", f"{what} {n}").get("ms") for what in ("hit", "fresh"))
            ratio = hit / cold if hit and cold else None
            yield f"from disk {n}, {runner}, cost model on", f"{hit:g} ms, {ratio:.3f} of cold" if ratio else "", f"<= {COST_MODEL_GOAL}", verdict(ratio <= COST_MODEL_GOAL if ratio else None)


def pairs(results: dict[str, Any]) -> Iterator[Row]:
    """From the end of one engine's last step to the first token of the other one."""
    for runner in RUNNERS:
        found = results.get(f"pd-{runner}", {}).get("decode", {})
        sizes = sorted({what.split()[-1] for what in found if what.startswith("pd cold ")}, key=int)
        for n, (way, goal) in ((n, item) for n in sizes for item in PAIR.items()):
            ms, own = (found.get(f"pd {what} {n}", {}).get("ms") for what in (way, "own hit"))
            limit = goal if n == sizes[len(sizes) // 2] else None
            text = "" if ms is None else f"{ms:g} ms after the last step, own hit {own:g}"
            yield f"handed over {way}, {n}, {runner}", text, f"<= {limit:g}" if limit else "-", verdict(None if ms is None or limit is None else ms <= limit)


def pairs_in_gpu_memory(results: dict[str, Any]) -> Iterator[Row]:
    """The same, in memory of the one engine's GPU and in host memory alone, in one run."""
    for runner in RUNNERS:
        found = results.get(f"pd-{runner}-hbm", {}).get("decode", {})
        for n, way in ((n, way) for n in sorted({what.split()[-1] for what in found if what.startswith("pd cold ")}, key=int) for way in PAIR):
            ms, host, own = (found.get(f"pd {what} {n}", {}).get("ms") for what in (way, f"{way} in host memory", "own hit"))
            text = "no memory of a GPU" if ms is None or host is None else f"{ms:g} ms after the last step, in host memory {host:g}, own hit {own:g}"
            yield f"handed over {way} in GPU memory, {n}, {runner}", text, "less than in host memory", verdict(None if ms is None or host is None else ms < host)


def pairs_and_own_hits(results: dict[str, Any]) -> Iterator[Row]:
    """Hand-overs in GPU memory, as far behind the decoding engine's own hit as they are, and whether it computed any of their tokens again."""
    for runner in RUNNERS:
        found = results.get(f"pd-{runner}-hbm", {}).get("decode", {})
        for n, way in ((n, way) for n in sorted({what.split()[-1] for what in found if what.startswith("pd own hit ")}, key=int) for way in PAIR):
            handed, own = found.get(f"pd {way} {n}"), found[f"pd own hit {n}"]["ms"]
            again = max(0, int(n) - min(handed["cached"]) - BLOCK) if handed else 0
            limit = own + ABOVE_OWN_HIT_MS if way == "one after the other" else None
            text = f"{handed['ms'] - own:+.1f} ms, {again} tokens computed again at the most" if handed else ""
            goal = "no token computed again" if limit is None else f"<= own hit + {ABOVE_OWN_HIT_MS:g} ms, no token computed again"
            yield f"handed over {way} in GPU memory, {n}, {runner}: behind own hit", text, goal, verdict(again == 0 and (limit is None or handed["ms"] <= limit) if handed else None)


def other_gpu(results: dict[str, Any]) -> Iterator[Row]:
    """Hits of an engine in memory of another one's GPU, beside its own of the same prompts. One that did not come from there is missed."""
    for runner in RUNNERS:
        found = results.get(f"peers-{runner}-hbm", {}).get("second", {})
        for n in sorted({what.split(", ")[1] for what in found if what.startswith("found in ")}, key=int) or list(HIT_MS):
            other, own_gpu, host = (found.get(f"found in {place}, {n}", {}) for place in ("another GPU", "its own GPU", "host memory"))
            text = f"{other['ms']:g} ms, {other['ratio']:g} of its own hit ({other['own']:g})" if "ms" in other else ""
            text += "".join(f", in {place} {hit['ms']:g}" for place, hit in (("its own GPU", own_gpu), ("host memory", host)) if "ms" in hit)
            text = ", ".join(part for part in (text.lstrip(", "), f"{other['missed']} of {len(other['from there'])} missed") if part) if other else ""
            yield f"hit in another engine's GPU, {n}, {runner}", text, f"<= {OTHER_GPU:g} x own hit, none missed", verdict(other["missed"] == 0 and other["ratio"] <= OTHER_GPU if other else None)


def pushing(results: dict[str, Any]) -> Iterator[Row]:
    """What hand-overs in GPU memory cost the engine that computes prompts, and steps of the one that generates."""
    for runner in RUNNERS:
        found = results.get(f"push-{runner}-hbm", {}).get("decode", {})
        for n in sorted({what.split()[-1] for what in found if what.startswith("prefill ")}, key=int) or list(HIT_MS):
            handed, alone, host = (found.get(f"prefill {way} {n}", {}) for way in ("handed over", "alone", "in host memory"))
            if not (handed and alone and host):
                yield f"prefill handed over in GPU memory, {n}, {runner}", "", f"<= +{PUSHING_PERCENT:g} %", verdict(None)
                continue
            more, saved = ([100 * (a / b - 1) for a, b in zip(of["each"], alone["each"])] for of in (handed, host))
            computed = all(of["cached"] == [0] for of in (handed, alone, host)) and found.get(f"prefill in GPU memory {n}") == len(more)
            text = f"{middle(more):+.2f} % ({min(more):+.2f} .. {max(more):+.2f}, {len(more)} rounds) of {alone['ms']:g} ms; saved in host memory {middle(saved):+.2f}"
            text += "" if computed else "; not all computed, or not all in GPU memory"
            yield f"prefill handed over in GPU memory, {n}, {runner}", text, f"<= +{PUSHING_PERCENT:g} %", verdict(computed and middle(more) <= PUSHING_PERCENT)
        beside = next((value for what, value in found.items() if what.startswith("beside ")), None)
        rounds = beside["rounds"] if beside else []
        ratio, every = (middle([one[what] / one["alone"] for one in rounds]) if rounds else 0.0 for what in ("beside", "all steps"))
        missed = sum(one["missed"] for one in rounds)
        text = f"{beside['ms']:g} ms a step, {ratio:.3f} x alone; {every:.3f} with steps that answer a prompt; {missed} prompts did not come in GPU memory" if beside else ""
        yield f"steps beside prompts that come in, {runner}", text, f"<= {BESIDE_PUSHES:g} x alone", verdict(0 < ratio <= BESIDE_PUSHES and missed == 0 if rounds else None)


def promotions(results: dict[str, Any]) -> Iterator[Row]:
    """Steps while blocks are saved in GPU memory, beside those of an engine that uses none, round by round."""
    for runner in RUNNERS:
        host, kvd = (results.get(f"steps-{runner}-hbm", {}).get(member, {}) for member in ("host", "kvd"))
        ratios, alone = ([a / b for a, b in zip(*(of.get(what, {}).get("rounds", []) for of in (kvd, host))) if b] for what in ("step beside promotions", "step alone"))
        blocks = sum(value for what, value in kvd.items() if what.startswith("promoted blocks"))
        text = f"{middle(ratios):.4f} ({min(ratios):.4f} .. {max(ratios):.4f}, {len(ratios)} rounds), alone {middle(alone):.4f}; {blocks} blocks" if ratios and alone else ""
        yield f"steps beside saves in GPU memory, {runner}", text, f"<= {BESIDE_PROMOTIONS:g} x without", verdict(blocks > 0 and 0 < middle(ratios) <= BESIDE_PROMOTIONS if ratios else None)


def full(results: dict[str, Any]) -> Iterator[Row]:
    for runner in RUNNERS:
        again = results.get(f"full-{runner}", {}).get("engine restarted")
        text = "" if again is None else f"up in {again.get('engine start s', '?')} s" if again.get("done") else f"failed: {again.get('failed')}"
        yield f"engine of 90 % of the memory after kill -9, {runner}", text, "starts at once", verdict(None if again is None else bool(again.get("done")))


def answers(results: dict[str, Any]) -> Iterator[Row]:
    """Of checks, and after loads that have failed (failed.py)."""
    for name, at, found in ((name, at, found) for name in sorted(results) for at, found in results[name].items() if isinstance(found, dict)):
        if name.startswith("check") and "same" in found:
            same = found["same"]
            yield f"{name}, {at}", f"{same['right']} of {same['of']}", "all equal, all found", verdict(same["right"] == same["of"] and not same["not all found"])
        for what, after in found.items():
            if isinstance(after, dict) and "as it should be" in after:
                yield f"{name}, {what}", f"{after['equal']} of {after['of']}, cached {after['cached']}", "all equal; all found, or none", verdict(after["as it should be"])
            if isinstance(after, dict) and "not all came" in after:
                tied = f", {after['tied']} by a tie" if after["tied"] else ""
                yield f"{name}, {what}", f"{after['right']} of {after['of']}{tied}", "all equal, all came", verdict(after["right"] == after["of"] and not after["not all came"])
            if name.startswith("failed") and what.startswith("after "):
                tied = f", {after['tied']} by a tie" if after["tied"] else ""
                text = f"{after['right']} of {after['of']}{tied}, {after['loads failed']} loads failed, in {after['asks with a failed load']} of {after['asks']} asks"
                yield f"{name}, {what}", text, "all equal, a load failed", verdict(after["right"] == after["of"] and after["loads failed"] > 0)


def table(results: dict[str, Any]) -> str:
    rows = [row for part in (hits, together, many, in_turns, disk_hits, pairs, pairs_in_gpu_memory, pairs_and_own_hits, other_gpu, pushing, promotions, full, answers) for row in part(results)]
    return "\n".join(["| what | measured | goal | |", "|---|---|---|---|"] + [f"| {' | '.join(row)} |" for row in rows]) + "\n"


if __name__ == "__main__":
    everything: dict[str, Any] = {}
    for path in sys.argv[1:]:
        everything.update(json.loads(Path(path).read_text())["results"])
    print(table(everything))
