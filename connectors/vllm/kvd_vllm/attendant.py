"""An idle engine calls no hook. Its scheduler half is attached to a restarted daemon all the same, and says what became of prompts that it was to hand over."""

from __future__ import annotations

import threading
from typing import Any

IDLE_S = 0.25
SOON_S = 0.02  # while it attaches, or something is pending


class Attendant:
    """Calls has_pending() of a scheduler half, in a thread, until close()."""

    def __init__(self, half: Any) -> None:
        self._closed = threading.Event()
        threading.Thread(target=self._attend, args=(half,), name="kvd-attendant", daemon=True).start()

    def _attend(self, half: Any) -> None:
        while not self._closed.wait(SOON_S if half.has_pending() or not half.is_ready() else IDLE_S):
            pass

    def close(self) -> None:
        self._closed.set()
