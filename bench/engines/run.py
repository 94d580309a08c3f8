"""Benchmarks of kvd under a real vLLM, always beside what it is compared with: pairs in turn, medians and spread. One JSON object a line.

usage: run.py [--only ttft turns unique thrash cpu micro pd transfer] [--lengths 1024,2048,4096,8192] [--rounds N] [--pairs N] [--store ...] [--out FILE] [--mp]
Interrupted, it says what it has until then.
"""
from __future__ import annotations

import argparse
import os
import pathlib
import signal
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "engines"))
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])

import load  # noqa: E402
import micro  # noqa: E402
import pd  # noqa: E402
import transfer  # noqa: E402
import ttft  # noqa: E402
from harness import Bench, Failed, Skipped  # noqa: E402
from rig import KINDS, Rig  # noqa: E402

FAMILIES = {"ttft": ttft.run, "turns": load.turns, "unique": load.unique, "thrash": load.thrash, "cpu": load.cpu, "micro": micro.run, "pd": pd.run, "transfer": transfer.run}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="kvd under a real vLLM, measured beside its alternatives")
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="connectors to compare")
    parser.add_argument("--lengths", default="1024,2048,4096,8192", help="of the prompts of ttft, in tokens")
    parser.add_argument("--rounds", type=int, default=5, help="of ttft, turns, cpu, pd and transfer")
    parser.add_argument("--pairs", type=int, default=15, help="of unique")
    parser.add_argument("--model", default="bench")
    parser.add_argument("--mp", action="store_true", help="multi-process engines (default: in-process)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", help="append the JSON lines to this file too")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    args.lengths = [int(n) for n in str(args.lengths).split(",")]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    status = 0
    with Bench(args.seed) as bench:
        rig = Rig(bench, args)
        try:
            for name in args.only:
                try:
                    FAMILIES[name](rig)
                except Skipped as reason:
                    rig.skipped(name, name, str(reason))
                rig.fresh()
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            status = 130
        except Failed as failure:
            print(f"failed: {failure}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
