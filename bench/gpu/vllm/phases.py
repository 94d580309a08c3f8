"""One vLLM engine, one process: phases.py ORDER.json RESULT.json. What it is asked for is in the one file; the other has what came of it, after every phase.

The phases of other files; engine.py has all others, and what each of them is."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Callable

import faults
from changed import Changes
from daemon import Daemon
from engine import WITHOUT, Bench, prompts_of
from failed import Failures
from pair import Decode, Peers, Prefill

ELSEWHERE: dict[str, Callable[[Bench], None]] = {
    "prefill": lambda bench: Prefill(bench).serve(),
    "paired": lambda bench: Decode(bench).times(),
    "handed": lambda bench: Decode(bench).check(),
    "pushing": lambda bench: Decode(bench).pushing(),
    "other_gpu": lambda bench: Peers(bench).times(),
    "other_gpu_same": lambda bench: Peers(bench).check(),
    "changed": lambda bench: Changes(bench, prompts_of(bench.order["seed"], [1030] * 4)).run(),
    "reference": lambda bench: Failures(bench).reference(),
    "failed": lambda bench: Failures(bench).run(bench.daemon),
}


def main() -> None:
    order = json.loads(Path(sys.argv[1]).read_text())
    daemon = None
    if order["daemon"] and not WITHOUT.intersection(order["phases"]):
        own = order["daemon"]
        environment = faults.hanging_disk(Path(own["work"]))
        daemon = Daemon(Path(own["kvd"]), Path(own["work"]), [*own["options"], "--keeper=off", "--nvme.io_engine=threads"], environment, group=True)
        daemon.start()
    bench = Bench(order, Path(sys.argv[2]), daemon)
    bench.run(ELSEWHERE)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
