"""Runs the tests of a real engine. Exit 0: every promise kept; 1: one was not; 77: cannot run here.

usage: run.py [--short|--full] [--store kvd|naive] [--seed N] [--only TEXT ...] [--share I/N] [--list] [--keep] [--fail-fast]
"""
from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import signal
import sys
import time
import traceback

import promises
from context import Context
from harness import BUILD, Bench, Failed, Missed, Skipped, tail

TRIES = 3  # of a test that has missed only
MODULES = ("test_equal", "test_controls", "test_killed", "test_shared", "test_weights", "test_pd", "test_nixl", "test_proxy", "test_adapters", "test_images", "test_drafts", "test_failures", "test_failed", "test_states", "test_pipeline", "test_device", "test_leaks", "test_absent")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="tests of kvd under a real vLLM")
    parser.add_argument("--short", action="store_true", help="a few minutes")
    parser.add_argument("--full", action="store_true", help="everything (default)")
    parser.add_argument("--store", choices=("kvd", "naive"), default="kvd", help="naive: the baseline, to prove the tests")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("SEED", "1")))
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="tests of these names, or whose name contains one of these")
    parser.add_argument("--share", default="1/1", metavar="I/N", help="every Nth test only, from the Ith on")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    parser.add_argument("--fail-fast", action="store_true")
    return parser.parse_args()


def why_not(store: str) -> str:
    """Why the tests cannot run here; empty: they can."""
    if not importlib.util.find_spec("vllm"):
        return "there is no vllm in this Python (scripts/engines.sh makes a venv with one)"
    if store == "kvd" and not importlib.util.find_spec("kvd_vllm"):
        return "there is no kvd_vllm in this Python (scripts/engines.sh installs it)"
    if store == "kvd" and not (BUILD / "bin" / "kvd").exists():
        return f"there is no daemon in {BUILD}"
    return ""


def run_one(test: promises.Test, args: argparse.Namespace, context: Context) -> str:
    """What went wrong; empty: nothing. A miss is tried again, and said."""
    for attempt in range(1, TRIES + 1):
        context.notes = []
        context.random.seed(f"{args.seed} {test.name} {attempt}")
        wrong, missed = try_one(test, context)
        if not missed or attempt == TRIES:
            break
        print(f"missed          {test.name}: {wrong}; once more", flush=True)
    return wrong


def try_one(test: promises.Test, context: Context) -> tuple[str, bool]:
    """What went wrong, and whether it was a miss only."""
    bench = context.bench
    before = len(bench.engines)
    try:
        test.function(context)
        problems = [problem for engine in bench.engines[before:] for problem in engine.problems()]
        return ("\n".join(["in the engines' logs:"] + problems[:20]) if problems else ""), False
    except Skipped:
        raise
    except Failed as failure:
        return str(failure), isinstance(failure, Missed)
    except Exception:
        return traceback.format_exc(), False
    finally:
        for engine in bench.engines[before:]:
            if engine is not context.oracle.engine:
                engine.kill()
        for daemon in bench.daemons:
            daemon.kill()


def run(tests: list[promises.Test], args: argparse.Namespace) -> int:
    failed: list[str] = []
    skipped = 0
    began = time.monotonic()
    with Bench(args.seed, args.keep) as bench:
        context = Context(bench, args.store, args.short, args.seed)
        for test in tests:
            start, engines, daemons = time.monotonic(), len(bench.engines), len(bench.daemons)
            try:
                wrong = run_one(test, args, context)
            except Skipped as reason:
                skipped += 1
                print(f"skipped         {test.name}: {reason}", flush=True)
                continue
            print(f"{'FAILED' if wrong else 'ok':6s} {time.monotonic() - start:6.1f} s  {test.name}{': ' if context.notes else ''}{'; '.join(context.notes)}",
                  flush=True)
            if wrong:
                failed.append(test.name)
                print("       " + wrong.replace("\n", "\n       "), flush=True)
                for one in (*bench.engines[engines:], *bench.daemons[daemons:]):
                    print(f"       {one.log}:\n{tail(one.log)}", flush=True)
                if args.fail_fast:
                    break
    print(f"engines: {len(tests) - len(failed) - skipped} of {len(tests) - skipped} promises kept in {time.monotonic() - began:.0f} s, seed {args.seed}"
          + (f"; not kept: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def main() -> int:
    args = arguments()
    for module in MODULES:
        importlib.import_module(module)
    names = {t.name for t in promises.tests}
    tests = [t for t in promises.tests if (not args.only or any(text == t.name or (text in t.name and text not in names) for text in args.only))
             and (args.store == "kvd" or not t.daemon) and (t.short or not args.short)]
    first, every = (int(number) for number in args.share.split("/"))
    tests = tests[first - 1::every]
    if args.list:
        print("\n".join(f"{t.name:44s} {t.function.__doc__ or ''}" for t in tests))
        return 0
    if reason := why_not(args.store):
        print(f"engines: skipped: {reason}")
        return 77
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends with its Bench
    print(f"engines: {len(tests)} tests, store {args.store}, seed {args.seed}, {'short' if args.short else 'full'}", flush=True)
    return run(tests, args)


if __name__ == "__main__":
    sys.exit(main())
