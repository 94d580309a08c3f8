"""What is not served, and what went wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Declined(Exception):
    """This engine's cache is not served, and why. The engine goes on without us."""


class CircuitBreaker:
    """Errors inside a hook: logged once a kind, counted, and the connector switched off when there are too many. One is too many in the hooks that learn which
    blocks were given to whom: what is saved after a gap in that would be somebody else's."""

    FATAL = ("update_state_after_alloc", "build_connector_meta")

    def __init__(self, log: Any, most: int = 32) -> None:
        self.log = log
        self.most = most
        self.total = 0
        self.seen: set[tuple[str, str]] = set()
        self.on_open: Callable[[str], None] | None = None

    def error(self, hook: str, exception: BaseException | None) -> None:
        self.total += 1
        kind = (hook, type(exception).__name__)
        if kind not in self.seen:
            self.seen.add(kind)
            self.log.error("kvd: internal error in %s, answered as a miss: %r", hook, exception, exc_info=exception)
        if self.on_open is not None and (self.total >= self.most or hook in self.FATAL):
            on_open, self.on_open = self.on_open, None
            on_open(f"{self.total} internal errors")
