"""What is measured: which engines, with which connector, one after another or in turns, and how long that takes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

NOTHING = {"kv_connector": "Nothing", "kv_connector_module_path": "nothing", "kv_role": "kv_both"}
LMCACHE = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
# Several GPUs: nothing may use NVLink multicast, which can put a host's GPUs out of service.
TWO_GPUS = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}


def kvd(**extra: Any) -> dict[str, Any]:
    """The name vouches for weights that the bench itself draws: a first pass would else not be saved before they are digested (weights=None: that)."""
    extra = {"weights": "bench", **extra}
    return {
        "kv_connector": "KvdConnector",
        "kv_connector_module_path": "kvd_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": "SOCKET", **{name: value for name, value in extra.items() if value is not None}},
    }


def watched(connector: dict[str, Any], name: str = "Watched") -> dict[str, Any]:
    return {**connector, "kv_connector": name, "kv_connector_module_path": "watched"}


def counted(connector: dict[str, Any]) -> dict[str, Any]:
    return watched(connector, "Counted")


def native(gib: int) -> dict[str, Any]:
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": gib << 30}}


def lmcache(gib: int) -> dict[str, str]:
    return {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": str(gib), "LMCACHE_CHUNK_SIZE": "256", "LMCACHE_TRACK_USAGE": "false"}


@dataclass
class Configuration:
    """`engines`: (name, phases) one after another; "daemon" as phases restarts the daemon instead, "crash" kills it, "upgrade" replaces it. Then `pair`: two at once; the second one leads.
    Or `ring`: engines of these connectors at once, in turns."""

    connector: dict[str, Any] | None
    engines: list[tuple[str, list[str]]]
    runner: int = 2
    daemon: str = ""  # "": none; "memory"; "disk": with a disk tier; "own": with a disk tier, of the engine's process
    environment: dict[str, str] = field(default_factory=dict)
    weights: str = "dummy"
    gpus: int = 1
    kv_gib: int = 0  # 0: as asked for
    pool_gib: int = 0  # the same
    gpu_gib: int = 0  # of kvd's memory on each GPU; 0: none
    graph: bool | None = None  # the same
    options: dict[str, Any] = field(default_factory=dict)  # of the engine
    beside: bool = False  # nothing is timed: it runs beside others
    ring: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    round: str = "round"  # what each of them has when it is its turn
    pair: dict[str, int] = field(default_factory=dict)  # GPUs of the one and of the other: the first ones, the last ones
    lead: str = "paired"  # phase of the engine that leads
    profiled: bool = False  # steps of each of the ring's engines under torch's profiler, last

    def turns(self, rounds: int) -> int:
        """About what the rounds of a ring take, in seconds."""
        return rounds * 10 * len(self.ring)

    def pair_phases(self) -> tuple[list[str], list[str]]:
        return ["prefill"], [self.lead]

    def seconds(self, graph: bool, rounds: int) -> int:
        """About what it takes on an H200: import and start, then the phases; the first engine of a run with CUDA graphs COMPILE more."""
        start = 32 if graph else 24
        if self.ring:
            return start * len(self.ring) + self.turns(rounds)
        engines = [phases for _, phases in self.engines if phases not in DAEMON] + ([self.pair_phases()[1]] if self.pair else [])
        return sum(start + sum(COST.get(phase, 5) for phase in phases) for phases in engines) + 3


DAEMON = (["daemon"], ["crash"], ["upgrade"])
COMPILE = 30
COST = {"trace": 10, "profile": 10, "cold": 12, "fresh": 12, "gpu": 1, "hit": 4, "in_turn": 8, "together": 6, "burst": 3, "steady": 4, "tokens": 25, "same": 15, "control": 10, "reference": 10, "failed": 130, "changed": 40, "named": 15, "expected": 20, "talk_begin": 15, "talk_end": 15, "paired": 30, "handed": 30, "pushing": 60, "other_gpu": 60, "other_gpu_same": 40}
ALL = ["cold", "gpu", "hit", "together", "burst", "steady"]
CHAIN = [("first engine", ALL), ("engine restarted", ["hit", "gpu", "together", "burst", "again"])]
CHECKS = [("first engine", ["tokens", "same", "control"]), ("engine restarted", ["same"]), ("daemon", ["daemon"]), ("daemon restarted", ["same"])]
HBM = [("first engine", ["cold", "gpu", "hit", "kept"]), ("engine restarted", ["in_turn", "together"])]
TALK = [("first engine", ["talk_begin"]), ("engine restarted", ["talk_end"])]
HBM_CHECKS = [("first engine", ["tokens", "same", "control"]), ("engine restarted", ["same"])]
WARM = [("first engine", ["tokens", "same", "control"]), ("daemon", ["crash"]), ("engine restarted", ["same", "kept"]), ("daemon", ["upgrade"]), ("after an upgrade", ["same", "kept"])]
DISK = [("first engine", ["cold"]), ("daemon", ["daemon"]), ("daemon restarted", ["hit", "fresh"])]
FULL = [("first engine", ["cold"]), ("engine restarted", ["hit"])]
SYNC_LOADS = {"BENCH_WAYS": "sync,layers,prefetch"}
PD, PEERS = {"prefill": 1, "decode": 1}, {"first": 1, "second": 1}
NAMES = [("weights on disk", ["unread", "unnamed", "named"]), ("named before", ["unread", "named"]), ("weights in memory", ["unnamed", "named"])]


def tried(connector: dict[str, Any], name: str = "Tried") -> dict[str, Any]:
    return {**connector, "kv_connector": name, "kv_connector_module_path": "failing"}


def failing(runner: int, scheduling: bool, graph: bool, ways: str, gpu_gib: int = 0) -> Configuration:
    """Loads that fail. ways: as the table of survivors says, all synchronous whatever it says, or asynchronous. Answers depend on the batch as little as can be."""
    return Configuration(
        tried(kvd(cost_model=False, load_ms=500, wait_us=100000, layers_mb=4, mode={"": "auto", "-sync": "sync", "-async": "async"}[ways]), "Failing"),
        [("reference", ["reference"]), ("first engine", ["failed"])],
        runner,
        "own",
        environment={"VLLM_BATCH_INVARIANT": os.environ.get("VLLM_BATCH_INVARIANT", "1"), **(SYNC_LOADS if ways == "-sync" else {})},
        weights="drawn",
        kv_gib=2,
        pool_gib=3,
        gpu_gib=gpu_gib,
        graph=graph,
        options={"async_scheduling": scheduling},
        beside=True,
    )


def handed_over(runner: int, pair: dict[str, int], gpu_gib: int = 0, lead: str = "handed", **environment: str) -> Configuration:
    """Answers of prompts that another engine has computed."""
    environment = {"VLLM_BATCH_INVARIANT": os.environ.get("VLLM_BATCH_INVARIANT", "1"), **environment}
    connector = counted(kvd(cost_model=False, load_ms=20000))
    return Configuration(connector, [("expected", ["expected"])], runner, "memory", weights="drawn", pair=pair, lead=lead, graph=False, gpu_gib=gpu_gib, kv_gib=12 if gpu_gib else 0, environment=environment)


def of_runner(runner: int, gib: int) -> dict[str, Configuration]:
    return {
        "none": Configuration(None, [("first engine", ["cold", "gpu"])], runner),
        "ring": Configuration(None, [], runner, "memory", ring={"none": None, "nothing": NOTHING, "kvd": kvd()}),
        "native": Configuration(native(gib), [("first engine", ALL)], runner),
        "lmcache": Configuration(LMCACHE, [("first engine", ALL)], runner, environment=lmcache(gib)),
        "kvd": Configuration(kvd(), CHAIN, runner, "memory"),
        "trace": Configuration(watched(kvd()), [("first engine", ["cold", "trace", "steady"]), ("engine restarted", ["trace"])], runner, "memory"),
        "profile": Configuration(kvd(), [("first engine", ["cold", "profile"])], runner, "memory"),
        "steps": Configuration(None, [], runner, "memory", ring={"nothing": NOTHING, "no saves": {**kvd(), "kv_role": "kv_consumer"}, "kvd": kvd()}, profiled=True),
        "steps-hbm": Configuration(
            None, [], runner, "memory", gpu_gib=8, kv_gib=9, round="promotions", ring={"host": counted(kvd(device="none", weights="bench, device none")), "kvd": counted(kvd())}
        ),
        "kvd-hbm": Configuration(kvd(), HBM, runner, "memory", gpu_gib=22, kv_gib=24),
        "talk-hbm": Configuration(kvd(), TALK, runner, "memory", pool_gib=72, gpu_gib=20, kv_gib=24),
        "talk": Configuration(kvd(), TALK, runner, "memory", pool_gib=72, kv_gib=45),
        "check-hbm": Configuration(kvd(cost_model=False, load_ms=20000), HBM_CHECKS, runner, "memory", weights="drawn", gpu_gib=12, kv_gib=12),
        "check-warm-hbm": Configuration(kvd(cost_model=False, load_ms=20000), WARM, runner, "memory", weights="drawn", gpu_gib=12, kv_gib=12),
        "kvd-async": Configuration(kvd(mode="async"), CHAIN, runner, "memory"),
        "disk": Configuration(kvd(), DISK, runner, "disk"),
        "full": Configuration(kvd(), FULL, runner, "memory", kv_gib=108),
        "check": Configuration(kvd(cost_model=False, load_ms=20000), CHECKS, runner, "disk", weights="drawn"),
        "check-async": Configuration(kvd(cost_model=False, load_ms=20000, mode="async"), CHECKS[:2], runner, "memory", weights="drawn"),
        **{
            f"failed{'' if scheduling else '-plain'}{'-graph' if graph else ''}{ways}": failing(runner, scheduling, graph, ways)
            for scheduling in (True, False)
            for graph in (False, True)
            for ways in ("", "-sync", "-async")
        },
        **{f"failed{'-graph' if graph else ''}{ways}-hbm": failing(runner, True, graph, ways, 2) for graph in (False, True) for ways in ("", "-async")},
        "pd": Configuration(kvd(), [], runner, "memory", pair=PD),
        "pd-hbm": Configuration(kvd(), [], runner, "memory", pair=PD, gpu_gib=6, kv_gib=24),
        "push-hbm": Configuration(counted(kvd()), [], runner, "memory", pair=PD, lead="pushing", gpu_gib=6, kv_gib=24),
        "peers-hbm": Configuration(counted(kvd()), [], runner, "memory", pair=PEERS, lead="other_gpu", gpu_gib=22, kv_gib=24),
        "check-pd": handed_over(runner, PD),
        "check-pd-hbm": handed_over(runner, PD, 6),
        "check-pd-tp2to1": handed_over(runner, {"prefill": 2, "decode": 1}, **TWO_GPUS),
        "check-pd-tp1to2": handed_over(runner, {"prefill": 1, "decode": 2}, **TWO_GPUS),
        "check-peers-hbm": handed_over(runner, PEERS, 12, "other_gpu_same"),
        "weights": Configuration(kvd(weights=None, cost_model=False), NAMES, runner, "memory", weights="drawn", environment={"XDG_CACHE_HOME": "WORK"}, graph=False),
        "check-weights": Configuration(
            kvd(cost_model=False, load_ms=20000), [("first engine", ["changed"])], runner, "memory", weights="drawn", graph=False, environment={"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}, options={"enable_sleep_mode": True}
        ),
        "check-tp2": Configuration(kvd(cost_model=False, load_ms=20000), CHECKS[:2], runner, "memory", weights="drawn", gpus=2, environment=TWO_GPUS),
        "check-tp2-hbm": Configuration(kvd(cost_model=False, load_ms=20000), HBM_CHECKS, runner, "memory", weights="drawn", gpus=2, environment=TWO_GPUS, gpu_gib=8, kv_gib=12),
    }


def configurations(gib: int) -> dict[str, Configuration]:
    table = {}
    for runner in (2, 1):
        for name, configuration in of_runner(runner, gib).items():
            stem, _, rest = name.partition("-")
            table[f"{stem}-v{runner}{'-' + rest if rest else ''}"] = configuration
    return table
