"""kvd's connector with the ways to load that BENCH_WAYS names (with commas), whatever its table of survivors says: how an engine is tried before it has a row. Without
the variable: as the table says."""

from __future__ import annotations

import os

from kvd_vllm import compat
from kvd_vllm.connector import KvdConnector

_listed = compat.load_ways


def _tried(mode: compat.Mode, wanted: str, groups: int = 1) -> compat.LoadWays:
    ways = frozenset(os.environ["BENCH_WAYS"].split(","))
    return _listed(mode, wanted, groups, (compat.Survivor(mode, ways, "tried", mode.version == "0.25.1"),))


if "BENCH_WAYS" in os.environ:
    compat.load_ways = _tried


class Tried(KvdConnector):
    pass
