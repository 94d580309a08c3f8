"""What lies between an engine's kernels: gaps.py PROFILE.json.gz ... (torch's profiles, as steps-v2 and trace-v2 leave them in $OUT/profile).

Of the stream with most kernels, between the end of one and the beginning of the next, where that is under 5 us: within a graph, not between two. A driver may
make them longer for a whole process (docs/decisions/017-kernels-as-graphs.md).
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

WITHIN_US = 5.0


def gaps(profile: Path) -> dict[str, Any]:
    with gzip.open(profile) as file:
        events = json.load(file)["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    streams = Counter(e["args"]["stream"] for e in kernels).most_common(1)
    if not streams:
        return {"kernels": 0}
    there = sorted((e for e in kernels if e["args"]["stream"] == streams[0][0]), key=lambda e: e["ts"])
    between = sorted(b["ts"] - a["ts"] - a["dur"] for a, b in zip(there, there[1:]))
    between = [gap for gap in between if gap < WITHIN_US]
    if not between:
        return {"kernels": len(there)}
    return {"kernels": len(there), "mean us": round(sum(between) / len(between), 3), "median us": round(between[len(between) // 2], 3)}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, json.dumps(gaps(Path(name))))
