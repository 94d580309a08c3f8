"""What kvd does for a vLLM, in a minute: cold, engine restarted, daemon restarted. Exit 1: an answer differs, or nothing was hit."""
from __future__ import annotations

import os
import random
import signal
import sys
import time

from context import difference
from harness import Answer, Bench, Daemon, Engine, Failed
from models import FIRST_TOKEN, VOCAB

TOKENS = (1000, 2000, 4000)
TURN = "{:34s} {:>9s} {:>9s} {:>9s}   {:>10s}   {}"
OPTIONS = dict(max_model_len=4352, max_num_batched_tokens=2048, num_gpu_blocks_override=400)


def start(bench: Bench, daemon: Daemon | None) -> Engine:
    engine = bench.engine("bench", bench.kvd(daemon) if daemon else None, **OPTIONS)
    shuffle = random.Random(time.time_ns())
    for length in (300, 2000):  # the first prefills of a process are slow, with or without a cache
        engine.generate([[shuffle.randrange(FIRST_TOKEN, VOCAB) for _ in range(length)]], 2)
    return engine


def ask(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    return engine.generate(prompts, 16, together=False)


def show(phase: str, answers: list[Answer], expected: list[Answer], prompts: list[list[int]], hits: bool) -> None:
    d = difference(expected, answers)
    cached, total = sum(a.cached or 0 for a in answers), sum(map(len, prompts))
    print(TURN.format(phase, *[f"{a.ttft_ms:.0f} ms" for a in answers], f"{cached / total:.0%}", "different" if d.any() else "equal"), flush=True)
    if d.any():
        raise Failed(f"{phase}: the answers are not those of the engine without kvd: {d}")
    if hits and cached < total // 2:
        raise Failed(f"{phase}: only {cached} of {total} prompt tokens came from kvd")


def settle(daemon: Daemon) -> None:
    """Until all that was stored is on disk too."""
    for _ in range(100):
        stats = daemon.stats()
        if not stats["kvd_puts"] and stats["kvd_tier_blocks{tier=disk}"] >= stats["kvd_blocks"] > 0:
            return
        time.sleep(0.05)
    raise Failed("the daemon has not written everything to disk in 5 s")


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    seed = int(os.environ.get("SEED", "1"))
    draw = random.Random(seed)
    prompts = [[draw.randrange(FIRST_TOKEN, VOCAB) for _ in range(n)] for n in TOKENS]
    with Bench(seed) as bench:
        engine = start(bench, None)
        expected = ask(engine, prompts)
        engine.kill()
        print(f"\nvLLM with a small random model; time to the first token of three prompts, seed {seed}\n")
        print(TURN.format("", *[f"{n} tok" for n in TOKENS], "from cache", "answers"))
        show("without kvd", expected, expected, prompts, False)
        disk = bench.folder("disk")
        daemon = bench.daemon(**{"cpu.size": "512MiB", "nvme.path": str(disk), "nvme.size": "1GiB", "nvme.file_size": "64MiB"})
        engine = start(bench, daemon)
        show("1 with kvd, cold", ask(engine, prompts), expected, prompts, False)
        settle(daemon)
        engine.kill()
        engine = start(bench, daemon)
        show("2 engine killed -9, restarted", ask(engine, prompts), expected, prompts, True)
        settle(daemon)
        engine.kill()
        daemon.stop()
        daemon.start()
        engine = start(bench, daemon)
        show("3 both restarted: from disk", ask(engine, prompts), expected, prompts, True)
        engine.reset()
        show("4 once more: from memory", ask(engine, prompts), expected, prompts, True)
        daemon.kvctl("check")
        if problems := bench.problems():
            raise Failed("\n".join(problems))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as failure:
        print(f"demo: {failure}", file=sys.stderr)
        sys.exit(1)
