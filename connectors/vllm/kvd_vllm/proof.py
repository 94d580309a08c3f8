"""Whether the weights still have their name. (Decision 071.)

A reset of the engine's prefix cache, a pause, a sleep may mean that the weights were changed in place. From then on the name is unproven: nothing is loaded or saved, and
no block is touched. When the first request after it is looked up, each rank digests the weights in its memory (memory.py). All as at the start: the name is the one
of before. Others: the digests name them. Unknown: a random name, which no other engine finds."""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvd_vllm import weights

logger = logging.getLogger("vllm.kvd")

DEADLINE_S = 30.0  # 16 GB take 30 ms on a GPU, and 10 s on a slow CPU
YIELD_S = 0.001  # each step beside a CPU's digest: an engine in one process tries again at once, and its thread would keep that of the digest from running
SAME, OTHER, UNKNOWN = "same", "other", "unknown"


@dataclass(frozen=True)
class Answer:
    """Of a rank. `unread`: a part of the weights is known to be as it was loaded, and was not read; `reason`: of UNKNOWN."""

    number: int
    rank: int
    kind: str
    digest: str = ""
    unread: bool = False
    reason: str = ""


def name_of(answers: list[Answer], base: str, kind: str) -> weights.Named:
    """The name after a proof of all ranks. `base`: the name at the start, `kind`: all else that decides how weights lie in memory."""
    unknown = next((answer for answer in answers if answer.kind == UNKNOWN), None)
    if unknown is not None:
        return weights.unshared(f"rank {unknown.rank}: {unknown.reason}")
    if all(answer.kind == SAME for answer in answers):
        return weights.Named(base)
    told = [(answer.rank, answer.digest) for answer in sorted(answers, key=lambda answer: answer.rank)]
    text = repr((kind, base if any(answer.unread for answer in answers) else "", told))
    return weights.Named("memory:" + hashlib.sha256(f"kvd memory 1\n{text}".encode()).hexdigest()[:32])


def find_self(method: str) -> Any:
    """The object that calls, directly or not, and has such a method; None: there is none."""
    frame = sys._getframe()
    while frame is not None and not callable(getattr(frame.f_locals.get("self"), method, None)):
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def call_first(owner: Any, method: str, first: Callable[[], None]) -> bool:
    """Each call of the method of this object is preceded by `first`. False: it has no such method."""
    original = getattr(owner, method, None)
    if not callable(original):
        return False

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        first()
        return original(*args, **kwargs)

    setattr(owner, method, wrapped)
    return True


class Naming:
    """Of the scheduler half; the engine's thread, but for begin(). `half` has the hooks that are replaced while the name is unproven and put back as they were, `c` the C half."""

    def __init__(self, half: Any, c: Any, ranks: int, kind: str, proving_meta: type) -> None:
        self.half, self.c, self.ranks, self.kind, self.proving_meta = half, c, ranks, kind, proving_meta
        self.base = ""  # the name at the start; empty: not known yet
        self.hooks: dict[str, Any] = {}  # those of before
        self.proved = True
        self.result: weights.Named | None = None  # of a proof that has ended while the name at the start was not known
        self.number = 0  # of the last proof asked for
        self.asked_at = 0.0  # 0: it is not asked for
        self.sent = 0
        self.answers: dict[int, Answer] = {}
        self.waiting: list[Any] = []  # requests that the C half does not know yet

    def begin(self, text: str) -> None:
        """The name at the start is known. From the thread that digests the files."""
        self.base = text
        if self.proved:
            self.c.set_weights(text)

    def watch(self, pool: Any) -> None:
        """Once the engine has shown its block pool: resets, however they are asked for, and pauses."""
        seen = [call_first(pool, "reset_prefix_cache", functools.partial(self.suspend, "its prefix cache was reset"))]
        scheduler = find_self("set_pause_state")
        seen.append(scheduler is not None and call_first(scheduler, "set_pause_state", functools.partial(self.suspend, "it was paused or resumed")))
        if not all(seen):
            logger.warning("kvd: this engine's %s are not seen: weights changed in place need a name of their own (option weights)", "pauses" if seen[0] else "resets")

    def suspend(self, why: str) -> None:
        """Never raises into the engine."""
        try:
            self._suspend(why)
        except Exception as error:
            self.half._breaker.error("suspend", error)
            self.half._switch_off("the weights may have changed, and that could not be noted")

    def _suspend(self, why: str) -> None:
        half = self.half
        if half._c is None:
            return
        if self.proved:
            logger.info("kvd: the engine's weights may have been changed (%s): they are compared at the next request, and until then nothing is loaded or saved", why)
            replaced = {"get_num_new_matched_tokens": self._match, "build_connector_meta": self._build_meta, "update_connector_output": self._take_output}
            self.hooks = {name: getattr(half, name) for name in replaced}
            vars(half).update(replaced)
        self.proved, self.asked_at, self.result = False, 0.0, None
        self.c.suspend()

    def add_request(self, request: Any) -> None:
        if self.proved:
            self.c.add_request(request)
        elif not self.half._reason:
            self.waiting.append(request)  # what it asks for may need the space of its name

    # ---- hooks while the name is unproven ------------------------------------------------------------------------------

    def _match(self, request: Any, local: int) -> tuple[int | None, bool]:
        """Asks the engine to look it up again later."""
        if self.half._reason:
            return 0, False
        if not self.asked_at:
            self.number += 1
            self.asked_at, self.answers = time.monotonic(), {}
        elif time.monotonic() - self.asked_at > DEADLINE_S:
            self._end(weights.unshared(f"{len(self.answers)} of {self.ranks} ranks have said what their weights are"))
            return self.half.get_num_new_matched_tokens(request, local)
        return None, False

    def _build_meta(self, output: Any) -> Any:
        meta = self.hooks["build_connector_meta"](output)
        if self.asked_at and self.sent != self.number:
            self.sent = self.number
            meta = self.proving_meta(meta.message, self.number)
        elif self.asked_at and self.half._space.device != "cuda":
            time.sleep(YIELD_S)
        return meta

    def _take_output(self, output: Any) -> None:
        for answer in getattr(output.kv_connector_worker_meta, "proofs", ()):
            if answer.number == self.number and self.asked_at:
                self.answers[answer.rank] = answer
        self.hooks["update_connector_output"](output)
        if self.asked_at and len(self.answers) == self.ranks:
            self.result = name_of(list(self.answers.values()), self.base, self.kind) if self.base else None
            if self.result is not None:
                self._end(self.result)

    def _end(self, named: weights.Named) -> None:
        half, took = self.half, time.monotonic() - self.asked_at
        self.proved, self.asked_at = True, 0.0
        vars(half).update(self.hooks)
        self.c.set_weights(named.text)
        waiting, self.waiting = self.waiting, []
        for request in waiting:
            if not request.is_finished():
                self.c.add_request(request)
        what = "are those of the start" if named.text == self.base else "are others than at the start"
        logger.info("kvd: the weights in memory %s: %s after %.3f s", what, named.text, took)
        if named.private:
            logger.warning("kvd: no other engine finds this one's blocks: %s", named.private)
