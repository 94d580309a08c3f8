"""Two engines: one computes prompts (P), the other one generates (D) and leads. P answers one line of JSON by another on a socket in their folder.
Times are of one clock (CLOCK_MONOTONIC), whichever process reads it: from P's answer, which follows its last step, to D's first token.
Peers are two engines that hand nothing over: what P has used lies in memory of its GPU, and D finds it there."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any, Callable

from engine import ALONE, TOKENS, Bench, mean, prompts_of, steps_between
from failed import Failures

Json = dict[str, Any]
Prompt = list[int]
MEET_S, ANSWER_S = 300.0, 60.0  # the longest to wait for the other engine to start, and to answer
REFERENCES = 5  # rounds at most of what a hand-over in GPU memory is compared with
ROUNDS, INCOMING, BESIDE = 5, 3, 320  # of a request that generates: prompts that come in meanwhile, and its tokens


def add_request(bench: Bench, prompt: Prompt, tokens: int, params: Json | None, read: bool = True) -> None:
    """read: it may be found in a cache."""
    sampling = bench.exactly(tokens)
    sampling.extra_args = {"kv_transfer_params": params} if params else None
    sampling.skip_reading_prefix_cache = not read
    bench.llm.llm_engine.add_request(f"pair {time.time_ns()}", {"prompt_token_ids": prompt}, sampling)


def first_token(bench: Bench, prompt: Prompt, tokens: int, params: Json | None, meanwhile: Callable[[], None] = lambda: None, read: bool = True) -> Json:
    """When the request was made and its first token came, what of it was found, its answer and what the connector says with it. `meanwhile`: once it is on."""
    engine, began, first = bench.llm.llm_engine, time.monotonic(), 0.0
    add_request(bench, prompt, tokens, params, read)
    meanwhile()
    while engine.has_unfinished_requests():
        for answer in engine.step():
            first = first or time.monotonic()
            if answer.finished:
                output = answer.outputs[0]
                return {"began": began, "first": first, "cached": answer.num_cached_tokens or 0, "answer": list(output.token_ids), "params": answer.kv_transfer_params}
    raise RuntimeError("a request without an answer")


class Prefill:
    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def serve(self) -> None:
        """Until D has gone. An order is a prompt, or the name of what else there is to do."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.bench.order["pair"])
            listener.listen(1)
            listener.settimeout(MEET_S)
            stream = listener.accept()[0].makefile("rw")
        for line in stream:
            order = json.loads(line)
            found = getattr(self.bench, order["call"])() if "call" in order else first_token(self.bench, order["prompt"], 1, order["params"], read=order["read"])
            stream.write(json.dumps(found) + "\n")
            stream.flush()


class Decode:
    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.stream = self.meet()
        self.count = 0
        self.device: Json = {}  # the GPU in whose memory P hands over, as its answers name it
        self.host = False  # hand over in host memory alone

    def meet(self) -> Any:
        end = time.monotonic() + MEET_S
        while True:
            peer = socket.socket(socket.AF_UNIX)
            try:
                peer.connect(self.bench.order["pair"])
                peer.settimeout(ANSWER_S)
                return peer.makefile("rw")
            except OSError:
                peer.close()
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    def send(self, order: Json) -> None:
        self.stream.write(json.dumps(order) + "\n")
        self.stream.flush()

    def ask(self, prompt: Prompt, params: Json) -> None:
        more = {"transfer_device": "none"} if self.host else {}
        self.send({"prompt": prompt, "params": params | more, "read": True})

    def computed(self, prompt: Prompt, read: bool = True) -> Json:
        """P's answer to a prompt that it hands over to nobody."""
        self.send({"prompt": prompt, "params": None, "read": read})
        return self.answered()

    def call(self, name: str) -> None:
        """P does that."""
        self.send({"call": name})
        self.stream.readline()

    def answered(self) -> Json:
        found = json.loads(self.stream.readline())
        params = found["params"] or {}
        self.device = {"transfer_device": params["transfer_device"]} if "transfer_device" in params else self.device
        return found

    def one_name(self) -> tuple[Json, Json]:
        """Parameters of a request that both have at the same time: P's, and D's."""
        self.count += 1
        name = {"transfer_id": f"{self.bench.order['seed']} {self.count}"}
        return {"do_remote_decode": True, **name}, {"do_remote_prefill": True, **name, **({} if self.host else self.device)}

    def at_once(self, prompt: Prompt, tokens: int = 1) -> tuple[Json, Json]:
        """What P and D answer; both have the request at the same time."""
        send, receive = self.one_name()
        found = first_token(self.bench, prompt, tokens, receive, lambda: self.ask(prompt, send))
        return self.answered(), found

    def one_after_the_other(self, prompt: Prompt, tokens: int = 1) -> tuple[Json, Json]:
        self.ask(prompt, {"do_remote_decode": True})
        computed = self.answered()
        return computed, first_token(self.bench, prompt, tokens, computed["params"])

    def times(self) -> None:
        """Of each size and each way, in milliseconds: from P's answer to D's first token. Beside them, of the same prompts, D's own hits; and D's own first pass of others. Where P
        hands over in memory of its GPU, each way in host memory alone, too. All of those have REFERENCES rounds at most: of own hits the last prompts, which D still has."""
        ways = {"at once": self.at_once, "one after the other": self.one_after_the_other}
        self.at_once(self.prompts(9, min(self.bench.sizes), 1)[0])  # P's answer names its GPU, if there is one
        if self.device:
            ways = {f"{name}{where}": way for name, way in ways.items() for where in (" in host memory", "")}
        for n, count in self.bench.sizes.items():
            for at, (name, way) in enumerate(ways.items()):
                self.host = name.endswith("in host memory")
                prompts = self.prompts(at, n, (min(count, REFERENCES) if self.host else count) + 1)
                pairs = [way(prompt) for prompt in prompts][1:]  # the first one finds what others have left of the ring, the pool and the GPU's clock
                self.note(f"pd {name} {n}", [found["first"] - computed["first"] for computed, found in pairs], pairs)
                self.note(f"pd {name} {n}, whole", [found["first"] - min(computed["began"], found["began"]) for computed, found in pairs], pairs)
            own = [first_token(self.bench, prompt, 1, None) for prompt in prompts[1:][-REFERENCES:]]
            self.note(f"pd own hit {n}", [found["first"] - found["began"] for found in own], [(found, found) for found in own])
            cold = [first_token(self.bench, prompt, 1, None) for prompt in self.prompts(len(ways), n, min(count, REFERENCES))]
            self.note(f"pd cold {n}", [found["first"] - found["began"] for found in cold], [(found, found) for found in cold])

    def pushing(self) -> None:
        """What hand-overs in memory of P's GPU cost. P: from the request to the token, of a prompt that it hands over, of the same one computed again, which leaves nothing to
        save, and of another one that is saved in host memory; in turns. D: steps of a request that generates, with prompts that come in and without."""
        self.at_once(self.prompts(9, min(self.bench.sizes), 1)[0])
        for n, count in self.bench.sizes.items():
            found: dict[str, list[Json]] = {"handed over": [], "alone": [], "in host memory": []}
            for prompt, other in zip(self.prompts(0, n, count + 1), self.prompts(1, n, count + 1)):
                for name in found:
                    found[name].append(self.at_once(prompt)[0] if name == "handed over" else self.computed(prompt, False) if name == "alone" else self.computed(other))
                    self.call("settle")
            for name, all_of_it in found.items():
                pairs = [(one, one) for one in all_of_it[1:]]  # as in times()
                self.note(f"prefill {name} {n}", [one["first"] - one["began"] for one, _ in pairs], pairs)
            self.bench.note(f"prefill in GPU memory {n}", sum("transfer_device" in (one["params"] or {}) for one in found["handed over"][1:]))
        rounds = [{**self.beside_pushes([]), **self.beside_pushes(self.prompts(2 + i, self.bench.middle, INCOMING))} for i in range(ROUNDS)]
        self.bench.note(f"beside {INCOMING} x {self.bench.middle} handed over", {"ms": sorted(one["beside"] for one in rounds)[ROUNDS // 2], "rounds": rounds})

    def beside_pushes(self, prompts: list[Prompt]) -> Json:
        """Milliseconds of a step of a request that generates, the mean: alone, or while the prompts come in one after the other; all of its steps, with those that answer a prompt
        as well, and the longest; and how many prompts did not come in GPU memory."""
        before, sent = self.bench.counters()["handovers_received_gpu"], 0
        began = 0.0

        def push(tokens: int, answered: int) -> None:
            nonlocal sent, began
            if tokens < ALONE or answered < sent or sent == len(prompts):
                return
            if sent:
                self.answered()
            began = began or time.perf_counter()
            send, receive = self.one_name()
            add_request(self.bench, prompts[sent], 1, receive)
            self.ask(prompts[sent], send)
            sent += 1

        at, answered = self.bench.generate_beside(BESIDE, push)
        if not prompts:
            return {"alone": round(1e3 * mean(steps_between(at, [], at[ALONE - 1], at[-1])), 4)}
        self.answered()
        self.call("settle")
        self.bench.settle()
        came = self.bench.counters()["handovers_received_gpu"] - before
        steps, every = (steps_between(at, left_out, began, answered[-1]) for left_out in (answered, []))
        return {"beside": round(1e3 * mean(steps), 4), "all steps": round(1e3 * mean(every), 4), "longest": round(1e3 * max(every, default=0.0), 2), "missed": len(prompts) - came}

    def prompts(self, at: int, n: int, count: int) -> list[Prompt]:
        return prompts_of(self.bench.order["seed"] + 100 * n + at, [n] * count)

    def note(self, name: str, seconds: list[float], pairs: list[tuple[Json, Json]]) -> None:
        each = [round(1e3 * s, 2) for s in seconds]
        self.bench.note(name, {"ms": sorted(each)[len(each) // 2], "each": each, "cached": sorted({found["cached"] for _, found in pairs})})

    def whole(self, prompt: Prompt) -> int:
        """Tokens of it that a cache may serve."""
        return (len(prompt) - 1) // self.bench.block * self.bench.block

    def check(self) -> None:
        """All tokens but the last have come, and the answers are those of an engine without a connector (failed.py says what is right)."""
        expected, prompts = json.loads(Path(self.bench.order["tokens"]).read_text()), self.bench.checked()
        for name, way, ours in (("at once", self.at_once, slice(0, None, 2)), ("one after the other", self.one_after_the_other, slice(1, None, 2))):
            found = [way(prompt, TOKENS)[1] for prompt in prompts[ours]]
            right = Failures.judged([one["answer"] for one in found], expected[ours])
            short = [(len(prompt), one["cached"]) for prompt, one in zip(prompts[ours], found) if one["cached"] < self.whole(prompt)]
            self.bench.note(f"handed over {name}", {**right, "not all came": short, "in memory of": self.device.get("transfer_device", "the host")})


class Peers(Decode):
    """D has never seen what P has used: once, and it lies in host memory; twice, and it lies in memory of P's GPU as well."""

    def use(self, prompts: list[Prompt], times: int) -> None:
        """P does, and has saved it; D has mapped what memory is new."""
        for prompt in prompts:
            for _ in range(times):
                self.computed(prompt)
                self.call("settle")
        self.call("wait_for_saves")
        self.bench.wait_for_saves()

    def reach(self) -> None:
        """D says that it can read memory of P's GPU with the report of a step, once there is some."""
        self.use(self.prompts(9, min(self.bench.sizes), 1), 2)
        self.bench.settle()

    def loaded(self) -> Counter[str]:
        """Tokens, so far, from each place."""
        found = self.bench.counters()
        return Counter({"another GPU": found["other_gpu_tokens"], "its own GPU": found["gpu_tokens"] - found["other_gpu_tokens"], "host memory": found["load_tokens"] - found["gpu_tokens"]})

    def times(self) -> None:
        """Of each size and each place. D saves in its own GPU what it has found anywhere."""
        self.reach()
        for n, count in self.bench.sizes.items():
            twice, once = (self.prompts(at, n, count + 1) for at in (0, 1))
            self.use(twice, 2)
            self.use(once, 1)
            self.hits("another GPU", n, twice)
            self.bench.wait_for_saves()
            self.bench.forget()
            self.hits("its own GPU", n, twice)
            self.hits("host memory", n, once)

    def hits(self, place: str, n: int, prompts: list[Prompt]) -> None:
        """Each prompt but the first, as in Decode.times(), and once more from D's own cache. A hit that did not come from that place as a whole is missed, and no time."""
        pairs, came = [], []
        for prompt in prompts:
            before, times = self.loaded(), []
            for _ in range(2):
                self.bench.settle()
                times.append(1e3 * self.bench.ask([prompt])[0])
            came.append((self.loaded() - before)[place])
            pairs.append(times)
        came, whole = came[1:], self.whole(prompts[0])
        pairs = [pair for pair, tokens in zip(pairs[1:], came) if tokens >= whole]
        found: Json = {"from there": came, "missed": len(came) - len(pairs)}
        if pairs:
            hit, own, ratio = (sorted(values)[len(pairs) // 2] for values in (*zip(*pairs), [a / b for a, b in pairs]))
            found |= {"ms": round(hit, 2), "own": round(own, 2), "ratio": round(ratio, 3), "each": [[round(ms, 2) for ms in pair] for pair in pairs]}
        self.bench.note(f"found in {place}, {n}", found)

    def check(self) -> None:
        """All whole blocks have come from P's GPU, and the answers are those of an engine without a connector."""
        expected, prompts = json.loads(Path(self.bench.order["tokens"]).read_text()), self.bench.checked()
        self.reach()
        self.use(prompts, 2)
        answers, short = [], []
        for prompt in prompts:
            before = self.loaded()
            answers.append(first_token(self.bench, prompt, TOKENS, None)["answer"])
            came = (self.loaded() - before)["another GPU"]
            if came < self.whole(prompt):
                short.append((len(prompt), came))
        self.bench.note("answers from another GPU", {**Failures.judged(answers, expected), "not all came": short})
