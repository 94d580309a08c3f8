"""The list of tests. A test is a function that raises harness.Failed; it is named after the promise it defends."""
from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Callable

if TYPE_CHECKING:
    from context import Context


@dataclasses.dataclass
class Test:
    name: str
    function: Callable[[Context], None]
    daemon: bool  # needs one: not for the baseline
    short: bool  # part of the short form


tests: list[Test] = []


def promise(daemon: bool = False, short: bool = True) -> Callable[[Callable[[Context], None]], Callable[[Context], None]]:
    def add(function: Callable[[Context], None]) -> Callable[[Context], None]:
        tests.append(Test(function.__name__, function, daemon, short))
        return function
    return add
