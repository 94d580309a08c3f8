"""What one vLLM engine is asked, with stop-watches; phases.py runs it.

phases: cold, gpu (the engine's own cache), kept (what each tier has), hit (the engine's cache dropped first), in_turn (each hit beside an own one), again (the same once more), fresh (other prompts, cold), together, burst, steady,
tokens (16 tokens each from the GPU's cache, kept in a file), same (16 tokens each without the engine's cache, compared with that file), control (a prompt with a
changed beginning answers otherwise), talk_begin and talk_end (users take turns, each half of them), turns (short rounds of cold, gpu and decode, in turns with other engines on the same GPU), trace (when each of the
connector's hooks was called during own hits and hits), profile (own hits, hits and steps under torch's profiler), reference (answers of an engine without a
connector, kept in a file), failed (loads fail, answers compared with that file: failed.py), named (how long until a prompt is found again; after unread: the
weights are not in memory when the engine starts; after unnamed: no engine has named them), expected (the likely tokens of answers of an engine without a connector, kept in
that file), prefill (prompts are computed for another engine: pair.py), paired (that engine's times), handed (its answers, compared with that file), pushing (what hand-overs
in GPU memory cost both engines), changed (weights changed in place, resets and sleep: changed.py), other_gpu (hits in memory of the other engine's GPU), other_gpu_same (answers from there, compared with that file)
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Callable

import faults
import model
from daemon import Daemon

Prompt = list[int]
BURST = 48
FOUND_S = 90.0  # in which a prompt is
TOKENS = 16  # of an answer that is compared with one of another engine
BEFORE = ("unread", "unnamed")  # phases that come before the engine
WITHOUT = {"reference", "expected"}  # phases of engines that have no connector
USERS, TURNS, TURN = 16, 8, 4096  # of a talk: tokens of a turn
GENERATED, ALONE = 160, 40  # tokens of a request that hits come beside, and before them
PROMOTED, EVERY = 3, 32  # prompts that are used again while a request generates, and tokens from one to the next: at its pace kvd saves one all the while


def prompts_of(seed: int, lengths: list[int]) -> list[Prompt]:
    drawn = random.Random(seed)
    return [[drawn.randrange(10, 4000) for _ in range(n)] for n in lengths]


def median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def steps_between(at: list[float], answered: list[float], first: float, last: float) -> list[float]:
    """Seconds from token to token in that time, without steps that answered another request as well."""
    return [b - a for a, b in zip(at, at[1:]) if first < b <= last and b not in answered]


def lower(values: list[float]) -> float:
    """The quartile: of what a busy host makes longer now and then, and never shorter."""
    return sorted(values)[len(values) // 4]


def events_of(file: Path) -> list[tuple[str, int, int]]:
    """What watched.py has written: hook, beginning, length; or "+" and a counter, when, how much more. Nothing where nobody watches."""
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def hooks_of(file: Path, began: int, ended: int) -> dict[str, Any]:
    """Of each hook (watched.py): milliseconds from the request's beginning to its first call and to the end of its last, how many calls, and what they took;
    and what kvd has counted meanwhile."""
    found: dict[str, Any] = {}
    for name, at, took in events_of(file):
        if began <= at <= ended and name.startswith("+"):
            found[name] = found.get(name, 0) + took
        elif began <= at <= ended:
            of = found.setdefault(name, {"first": round((at - began) / 1e6, 3), "calls": 0, "took": 0.0})
            of["last end"] = round((at + took - began) / 1e6, 3)
            of["calls"] += 1
            of["took"] = round(of["took"] + took / 1e6, 3)
    return {**found, "all": round((ended - began) / 1e6, 3)}


class Bench:
    def __init__(self, order: dict[str, Any], out: Path, daemon: Daemon | None) -> None:
        from vllm import LLM, SamplingParams

        self.daemon = daemon  # of this process

        self.order, self.out, self.sampling = order, out, SamplingParams
        self.result: dict[str, Any] = {}
        folder = model.folder_of(Path(order["models"]), order["shape"], order["weights"] == "drawn")
        self.prepare(folder)
        began = self.began = time.time()
        self.llm = LLM(
            model=str(folder),
            load_format="auto" if order["weights"] == "drawn" else "dummy",
            **dict(skip_tokenizer_init=True, max_model_len=40960, max_num_batched_tokens=order["step_tokens"], max_num_seqs=64, generation_config="vllm"),
            **dict(dtype="bfloat16", enforce_eager=not order["graph"], gpu_memory_utilization=order["share"], tensor_parallel_size=order["gpus"]),
            kv_cache_memory_bytes=order["kv_gib"] << 30,
            **order["options"],
            **({"kv_transfer_config": order["connector"]} if order["connector"] and not WITHOUT.intersection(order["phases"]) else {}),
            **({"profiler_config": {"profiler": "torch", "torch_profiler_dir": order["profile"], "ignore_frontend": True}} if "profile" in order["phases"] or order["profiled"] else {}),
        )
        self.note("engine start s", round(time.time() - began, 1))
        self.block = self.llm.llm_engine.vllm_config.cache_config.block_size
        self.sizes = {int(n): count for n, count in order["sizes"].items()}
        self.middle = sorted(self.sizes)[len(self.sizes) // 2]
        self.noise = random.Random(time.time_ns())

    def prepare(self, folder: Path) -> None:
        """What phases want that come before the engine."""
        if "unread" in self.order["phases"]:
            file = os.open(folder / "model.safetensors", os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
        if "unnamed" in self.order["phases"]:
            shutil.rmtree(Path(os.environ["XDG_CACHE_HOME"]) / "kvd", ignore_errors=True)

    def note(self, name: str, value: Any) -> None:
        self.result[name] = value
        self.out.write_text(json.dumps(self.result))
        print(f"{name}: {value}", flush=True)

    def exactly(self, tokens: int) -> Any:
        return self.sampling(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)

    def ask(self, prompts: list[Prompt], tokens: int = 1) -> tuple[float, list[int], list[list[int]]]:
        """Seconds, cached tokens and answers."""
        began = time.perf_counter()
        answers = self.llm.generate([{"prompt_token_ids": p} for p in prompts], self.exactly(tokens), use_tqdm=False)
        return time.perf_counter() - began, [a.num_cached_tokens or 0 for a in answers], [list(a.outputs[0].token_ids) for a in answers]

    def choices(self, prompt: Prompt, tokens: int) -> list[list[list[float]]]:
        """Of each token of its answer: that token and the other likely ones, with how much less likely each was (the logarithm)."""
        sampling = self.exactly(tokens)
        sampling.logprobs = 5
        answer = self.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0].outputs[0]
        found = []
        for token, likely in zip(answer.token_ids, answer.logprobs):
            less = [[other, round(likely[token].logprob - likely[other].logprob, 4)] for other in likely if other != token]
            found.append([[token, 0.0], *sorted(less, key=lambda choice: choice[1])])
        return found

    def pace(self, prompt: Prompt, tokens: int) -> float:
        """Seconds from one token to the next, the median: without what the request takes before its first one and after its last."""
        engine = self.llm.llm_engine
        engine.add_request(f"pace {time.time_ns()}", {"prompt_token_ids": prompt}, self.exactly(tokens))
        at = []
        while engine.has_unfinished_requests():
            if engine.step():
                at.append(time.perf_counter())
        return median([b - a for a, b in zip(at, at[1:])])

    def stored(self) -> str:
        """What the daemon has; the same twice: nothing is on its way. Empty without a daemon."""
        if not self.order["kvctl"]:
            return ""
        command = [self.order["kvctl"], "--socket", self.order["socket"], "stats", "kvd_blocks"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout

    def step(self, tokens: int) -> None:
        """A prompt that fills no block."""
        self.ask([[self.noise.randrange(10, 4000) for _ in range(10)]], tokens)

    def settle(self) -> None:
        """What the requests before have left to save goes out with these steps, and is copied in the pause."""
        self.step(3)
        time.sleep(self.order["pause"])

    def counters(self) -> dict[str, int]:
        """Of the scheduler half, when the last request ended (watched.Counted)."""
        return json.loads(Path(os.environ["BENCH_WATCH"]).read_text())

    def wait_for_saves(self) -> None:
        """Connectors store on later steps, kvd's transfer threads at the same time."""
        before = None
        for i in range(100):
            self.settle()
            now = self.stored()
            if i >= 2 and now == before:
                return
            before = now
        self.note("still storing", before)

    def forget(self) -> None:
        """The engine's own cache is empty after this."""
        for _ in range(100):
            if self.llm.reset_prefix_cache():
                self.step(1)  # kvd compares the weights at the first request after it
                return
            self.step(2)
            time.sleep(0.05)
        raise RuntimeError("the engine does not give its cache up")

    def times(self, name: str, prompts: list[Prompt], pause: float = 0.0) -> None:
        took, cached = [], set()
        for prompt in prompts:
            seconds, hit, _ = self.ask([prompt])
            took.append(1e3 * seconds)
            cached.update(hit)
            time.sleep(pause)
        self.note(name, {"ms": round(median(took), 2), "min": round(min(took), 2), "max": round(max(took), 2), "each": [round(ms, 2) for ms in took], "cached": sorted(cached)})

    def by_size(self) -> dict[int, list[Prompt]]:
        return {n: prompts_of(self.order["seed"] + n, [n] * count) for n, count in self.sizes.items()}

    def cold(self) -> None:
        for n, prompts in self.by_size().items():
            self.times(f"cold {n}", prompts, self.order["pause"])
        self.wait_for_saves()

    def gpu(self) -> None:
        for n, prompts in self.by_size().items():
            for prompt in prompts:
                self.ask([prompt])  # what hits of another size have dropped
            self.times(f"gpu {n}", prompts)

    def hit(self, name: str = "hit") -> None:
        for n, prompts in self.by_size().items():
            self.forget()
            self.times(f"{name} {n}", prompts)

    def in_turn(self) -> None:
        """A hit and then the engine's own, of each prompt: the host's speed drifts, so only neighbours compare."""
        for n, prompts in self.by_size().items():
            pairs = []
            for prompt in prompts * 3:
                self.forget()
                pairs.append([1e3 * self.ask([prompt])[0] for _ in range(2)])
            hits, own = zip(*pairs)
            ratio = median([a / b for a, b in pairs])
            self.note(f"in turn {n}", {"ms": round(median(hits), 2), "own": round(median(own), 2), "ratio": round(ratio, 3), "each": [[round(ms, 2) for ms in pair] for pair in pairs]})

    def kept(self) -> None:
        """What is used twice is saved in the memory of the GPU, and loaded from there: how much of what was looked up came from each tier."""
        self.wait_for_saves()
        command = [self.order["kvctl"], "--socket", self.order["socket"], "stats", "kvd_tier_blocks", "kvd_prefix_hit_tokens_total", "kvd_tier_bytes"]
        self.note("tiers", subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.split("\n"))

    def again(self) -> None:
        self.hit("again")

    def fresh(self) -> None:
        for n, prompts in self.by_size().items():
            self.times(f"fresh {n}", prompts_of(self.order["seed"] + n + 1, [n] * len(prompts)), self.order["pause"])
        self.wait_for_saves()

    def together_prompts(self) -> list[Prompt]:
        return (self.by_size()[self.middle] + prompts_of(self.order["seed"] + 7, [self.middle] * 8))[:8]

    def burst_prompts(self) -> list[Prompt]:
        return prompts_of(self.order["seed"] + 8, [min(self.sizes)] * BURST)

    def at_once(self, prompts: list[Prompt]) -> tuple[list[float], list[int]]:
        """Milliseconds until each has its token, in that order, and cached tokens."""
        engine = self.llm.llm_engine
        took, cached = [], []
        began = time.perf_counter()
        for i, prompt in enumerate(prompts):
            engine.add_request(f"at once {began} {i}", {"prompt_token_ids": prompt}, self.exactly(1))
        while engine.has_unfinished_requests():
            for answer in engine.step():
                if answer.finished:
                    took.append(1e3 * (time.perf_counter() - began))
                    cached.append(answer.num_cached_tokens or 0)
        return took, cached

    def hits_at_once(self, prompts: list[Prompt], rounds: int) -> list[dict[str, Any]]:
        """The last one's answer counts, and on the average they are there before."""
        self.ask(prompts)
        self.wait_for_saves()
        found = []
        for _ in range(rounds):
            self.forget()
            took, cached = self.at_once(prompts)
            found.append({"ms": round(took[-1], 1), "mean": round(sum(took) / len(took), 1), "each": [round(ms, 1) for ms in took], "cached": sorted(set(cached))})
        return found

    def together(self) -> None:
        runs = sorted(self.hits_at_once(self.together_prompts(), 3), key=lambda run: run["ms"])
        self.note(f"8 x {self.middle} hit", {**runs[1], "min": runs[0]["ms"]})

    def burst(self) -> None:
        """Many short ones: do they stay hits?"""
        runs = self.hits_at_once(self.burst_prompts(), 5)
        self.note(f"{BURST} x {min(self.sizes)} hit", {"ms": median([run["ms"] for run in runs]), "mean": median([run["mean"] for run in runs]), "rounds": [[run["ms"], run["mean"], run["cached"]] for run in runs]})

    def steady(self) -> None:
        """What a request that generates notices of hits that come meanwhile: from token to token, from when the engine has all of them on."""
        prompts = self.together_prompts()
        self.ask(prompts)
        self.wait_for_saves()
        runs = [self.beside_hits(prompts) for _ in range(3)]
        self.note(f"8 x {self.middle} hit beside one that generates", sorted(runs, key=lambda run: run["ms"])[1])

    def generate_beside(self, tokens: int, add: Callable[[int, int], None]) -> tuple[list[float], list[float]]:
        """When each token of one request that generates came, and each answer to the others, which `add` makes: it is told after each step how many there are of both."""
        engine = self.llm.llm_engine
        at: list[float] = []
        answered: list[float] = []
        engine.add_request(f"steady {time.time_ns()}", {"prompt_token_ids": prompts_of(time.time_ns(), [100])[0]}, self.exactly(tokens))
        while engine.has_unfinished_requests():
            answers = engine.step()
            now = time.perf_counter()
            answered += [now for answer in answers if not answer.request_id.startswith("steady")]
            at += [now for answer in answers if answer.request_id.startswith("steady")]
            add(len(at), len(answered))
        return at, answered

    def beside_hits(self, prompts: list[Prompt]) -> dict[str, Any]:
        self.forget()
        began, added = 0.0, 0.0

        def add(tokens: int, _: int) -> None:
            nonlocal began, added
            if tokens == ALONE and not began:
                began = time.perf_counter()
                for i, prompt in enumerate(prompts):
                    self.llm.llm_engine.add_request(f"at once {began} {i}", {"prompt_token_ids": prompt}, self.exactly(1))
                added = time.perf_counter()

        at, others = self.generate_beside(GENERATED, add)
        took = [1e3 * (when - began) for when in others]
        gaps = [(1e3 * (b - a), b) for a, b in zip(at, at[1:])]
        alone = [gap for gap, when in gaps if when < began]
        beside = [gap for gap, when in gaps if added + 0.005 < when < began + took[-1] / 1e3]
        answered = {"ms": round(took[-1], 1), "mean": round(sum(took) / len(took), 1), "each": [round(ms, 1) for ms in took]}
        return {**answered, "step": round(median(alone), 2), "beside": round(mean(beside), 2), "longest": round(max(beside, default=0.0), 2)}

    def talk(self, first: float, last: float) -> None:
        """Users in random order, each with one more turn: a prompt of all of its turns so far. This part of them."""
        drawn = random.Random(self.order["seed"] + 9)
        users = prompts_of(self.order["seed"] + 9, USERS * [TURN * TURNS + 1])
        order = [user for user in range(USERS) for _ in range(TURNS)]
        drawn.shuffle(order)
        turns = [(user, 1 + order[:i].count(user)) for i, user in enumerate(order)]
        took, cached = [], 0
        turns = turns[int(first * len(turns)) : int(last * len(turns))]
        for user, turn in turns:
            seconds, hit, _ = self.ask([users[user][: TURN * turn + 1]])
            took.append(1e3 * seconds)
            cached += hit[0]
        ordered = sorted(took)
        self.note("talk", {"ms": round(sum(took) / len(took), 1), "median": round(median(took), 1), "p99": round(ordered[int(0.99 * len(took))], 1), "turns": len(turns), "hit": round(cached / sum(TURN * turn for _, turn in turns), 4)})
        self.kept()

    def talk_begin(self) -> None:
        self.talk(0.0, 0.5)

    def talk_end(self) -> None:
        self.talk(0.5, 1.0)

    def turns(self) -> None:
        """One number in a file says whose turn it is: round * engines + place."""
        turn = Path(self.order["turn"]["file"])
        of, me = self.order["turn"]["of"], self.order["turn"]["me"]
        rounds: dict[str, list[float]] = {}
        self.note("ready", True)
        for i in range(self.order["turn"]["rounds"]):
            while turn.read_text() != str(i * of + me):
                time.sleep(0.005)
            for what, seconds in getattr(self, self.order["turn"]["round"])(i).items():
                rounds.setdefault(what, []).append(round(1e3 * seconds, 3))
            self.wait_for_saves()
            faults.write(turn.parent, turn.name, str(i * of + me + 1))
            for what, took in rounds.items():
                self.result[what] = {"ms": round(median(took), 2), "min": min(took), "max": max(took), "rounds": took}
            self.note("rounds", i + 1)

    def round(self, i: int) -> dict[str, float]:
        """Seconds of each, the prompts of a round the same for all engines, new to all."""
        took: dict[str, float] = {}
        for n in self.sizes:
            prompts = prompts_of(self.order["seed"] + 1000 * (i + 1) + n, [n] * (12 if n < 4096 else 2 if n < 20000 else 1))
            took[f"cold {n}"] = lower([self.ask([prompt])[0] for prompt in prompts])
            took[f"gpu {n}"] = lower([self.ask([prompt])[0] for prompt in prompts * (24 // len(prompts))])
        long = prompts_of(self.order["seed"] + 1000 * (i + 1) + 5, [max(self.sizes)])
        took[f"{len(long[0])} cold + 64 tokens"] = self.ask(long, 64)[0]
        self.wait_for_saves()  # else it is the saves of those before that are beside them
        took["decode step, one request"] = self.pace(prompts_of(self.order["seed"] + 1000 * (i + 1), [100])[0], 129)
        if self.order["profiled"] and i + 1 == self.order["turn"]["rounds"]:
            self.profile_of("steps", [], 24)
        took["16 x 4096 cold + 32 tokens"] = self.ask(prompts_of(self.order["seed"] + 1000 * (i + 1) + 7, [4096] * 16), 32)[0]
        return took

    def promotions(self, i: int) -> dict[str, float]:
        """Seconds of a step of a request that generates, alone and while prompts that come a second time are saved in memory of the GPU. Steps that answer those are left out."""
        prompts = prompts_of(self.order["seed"] + 1000 * (i + 1), [self.middle] * PROMOTED)
        for prompt in prompts:
            self.ask([prompt])
        self.wait_for_saves()
        before, used = self.counters()["gpu_blocks"], 0

        def use_again(tokens: int, _: int) -> None:
            nonlocal used
            while used < PROMOTED and tokens >= ALONE + EVERY * used:
                self.llm.llm_engine.add_request(f"again {i} {used}", {"prompt_token_ids": prompts[used]}, self.exactly(1))
                used += 1

        tokens, answered = self.generate_beside(GENERATED, use_again)
        self.wait_for_saves()
        self.note(f"promoted blocks {i}", self.counters()["gpu_blocks"] - before)
        first, last = tokens[ALONE - 1], tokens[ALONE + EVERY * PROMOTED]
        return {"step alone": mean(steps_between(tokens, [], tokens[1], first)), "step beside promotions": mean(steps_between(tokens, answered, first, last))}

    def trace(self) -> None:
        """Hits first, as after a restart."""
        for n, prompts in self.by_size().items():
            self.forget()
            for what in ("hit", "gpu"):
                self.note(f"trace {what} {n}", [self.traced([prompt]) for prompt in prompts])
        for together in (self.together_prompts(), self.burst_prompts()):
            self.ask(together)
            self.wait_for_saves()
            traces = []
            for _ in range(3):
                self.forget()
                traces.append(self.traced(together))
            self.note(f"trace {len(together)} x {len(together[0])} hit", traces)

    def traced(self, prompts: list[Prompt]) -> dict[str, Any]:
        """Each hook."""
        watched = Path(os.environ["BENCH_WATCH"])
        began = time.perf_counter_ns()
        took, _ = self.at_once(prompts)
        ended = time.perf_counter_ns()
        self.step(2)
        return {**hooks_of(watched, began, ended), "each": [round(ms, 1) for ms in took]}

    def profile_of(self, name: str, prompts: list[Prompt], steps: int) -> None:
        self.llm.start_profile(profile_prefix=name)
        for prompt in prompts:
            self.ask([prompt])
        if steps:
            self.step(steps)
        self.llm.stop_profile()

    def profile(self) -> None:
        first = [prompts[0] for prompts in self.by_size().values()]
        self.forget()
        self.profile_of("hits", first, 0)
        self.profile_of("own_hits", first, 0)
        self.profile_of("steps", [], 24)

    def checked(self) -> list[Prompt]:
        drawn = random.Random(self.order["seed"])
        return prompts_of(self.order["seed"], [drawn.randrange(300, 6000) | 1 for _ in range(self.order["prompts"])])

    def tokens(self) -> None:
        prompts = self.checked()
        for prompt in prompts:
            self.ask([prompt])
        self.wait_for_saves()
        answers = [self.ask([prompt], 16) for prompt in prompts]
        Path(self.order["tokens"]).write_text(json.dumps([answer[2][0] for answer in answers]))
        self.note("tokens", {"gpu hits": sum(answer[1][0] > 0 for answer in answers), "of": len(prompts)})

    def same(self) -> None:
        expected = json.loads(Path(self.order["tokens"]).read_text())
        self.forget()
        right, found, short, wrong = 0, 0, [], []
        for i, prompt in enumerate(self.checked()):
            _, cached, answer = self.ask([prompt], 16)
            right += answer[0] == expected[i]
            found += cached[0]
            if cached[0] < (len(prompt) - 1) // self.block * self.block:
                short.append((i, len(prompt), cached[0]))
            if answer[0] != expected[i]:
                wrong.append((i, len(prompt), cached[0]))
        self.note("same", {"right": right, "of": len(expected), "hit tokens": found, "not all found": short, "wrong": wrong})

    def control(self) -> None:
        expected = json.loads(Path(self.order["tokens"]).read_text())
        other = 0
        for prompt, answer in zip(self.checked(), expected):
            other += self.ask([[9] * 16 + prompt[16:]], 16)[2][0] != answer
        self.note("control", {"answers that change with the first block": other, "of": len(expected)})

    def named(self) -> None:
        """A prompt is asked again and again, the engine's cache dropped each time."""
        prompt = prompts_of(self.order["seed"], [min(self.sizes)])
        self.note("answering after s", round(time.time() - self.began, 2))
        for times in itertools.count(1):
            _, cached, _ = self.ask(prompt)
            if cached[0]:
                break
            if time.time() - self.began > FOUND_S:
                raise RuntimeError("the prompt is never found")
            self.step(2)
            self.forget()
        self.note("first hit after s", round(time.time() - self.began, 2))
        self.note("first hit", {"cached": cached, "asked": times})

    def expected(self) -> None:
        Path(self.order["tokens"]).write_text(json.dumps([self.choices(prompt, TOKENS) for prompt in self.checked()]))

    def run(self, elsewhere: dict[str, Callable[[Bench], None]]) -> None:
        """All phases; `elsewhere`: those of other files."""
        if "named" not in self.order["phases"]:
            for n in (33, 700, 9000, 2000):
                self.ask(prompts_of(n, [n]), 3)
        for phase in self.order["phases"]:
            if phase not in BEFORE:
                elsewhere.get(phase, lambda bench: getattr(bench, phase)())(self)
        self.wait_for_saves()
        self.note("done", True)
