"""What becomes of requests and blocks after a failed synchronous load (kvd_vllm/recovery.py), over a scheduler that has what the recovery touches. Needs no engine."""

from __future__ import annotations

import os
import pathlib
import random
import sys
import tempfile
import unittest
import unittest.mock
from collections import deque
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[1])]

from kvd_vllm import recovery  # noqa: E402

BLOCK, NULL, ROUNDS = 4, 0, 300
SEED = int(os.environ.get("KV_SEED", "1"))


def request(name: str, status: str, computed: int = 0, placeholders: int = 0) -> Any:
    return SimpleNamespace(request_id=name, status=SimpleNamespace(name=status), num_computed_tokens=computed, num_output_placeholders=placeholders, async_tokens_to_discard=0)


class Manager:
    """Tables, of each group one, and the blocks that a prefix can be found in."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.tables: dict[str, tuple[list[int], ...]] = {}
        self.named: set[int] = set()
        self.block_pool = SimpleNamespace(null_block=SimpleNamespace(block_id=NULL))
        self.coordinator = SimpleNamespace(single_type_managers=tuple(SimpleNamespace(block_size=size) for size in sizes))

    def get_block_ids(self, name: str) -> tuple[list[int], ...]:
        return self.tables.get(name, tuple([] for _ in self.coordinator.single_type_managers))

    def evict_blocks(self, blocks: set[int]) -> None:
        self.named -= blocks

    def free(self, freed: Any) -> None:
        self.tables.pop(freed.request_id, None)


class Scheduler:
    def __init__(self, asynchronous: bool = True, sizes: tuple[int, ...] = (BLOCK,)) -> None:
        self.kv_cache_manager = Manager(sizes)
        self.running: list[Any] = []
        self.waiting: deque[Any] = deque()
        self.skipped_waiting: deque[Any] = deque()
        self.scheduler_config = SimpleNamespace(async_scheduling=asynchronous)
        self.prev_step_scheduled_req_ids: set[str] = set()
        self.failed_recving_kv_req_ids: set[str] = set()
        self.recompute_kv_load_failures = True

    def add(self, where: Any, table: list[int] | tuple[list[int], ...], *args: Any) -> Any:
        added = request(*args)
        where.append(added)
        if table:
            self.kv_cache_manager.tables[added.request_id] = table if isinstance(table, tuple) else (table,)
            self.kv_cache_manager.named.update(*self.kv_cache_manager.tables[added.request_id])
        self.prev_step_scheduled_req_ids.add(added.request_id)
        return added

    def _preempt_request(self, preempted: Any, timestamp: float) -> None:
        assert preempted not in self.running
        self.kv_cache_manager.free(preempted)
        preempted.status.name, preempted.num_computed_tokens = "PREEMPTED", 0
        self.waiting.appendleft(preempted)

    def _handle_invalid_blocks(self, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]) -> set[str]:
        return {"the original"}


class Recovery(unittest.TestCase):
    def test_p1_all_sharers_are_preempted_and_keep_their_order(self) -> None:
        scheduler = Scheduler()
        tables = {"loads": [1, 2, 3], "shares": [1, 2, 3, 4], "other": [5, 6], "shares the rest": [7, 4, 8], "before it": [1, 9]}
        for name, table in tables.items():
            scheduler.add(scheduler.running, table, name, "RUNNING", 12, 1)
        queued = scheduler.add(scheduler.waiting, [], "queued", "WAITING")
        self.assertEqual(recovery.recover(scheduler, {2}, dict.fromkeys(tables, 1)), set())
        self.assertEqual([r.request_id for r in scheduler.running], ["other", "before it"])
        self.assertEqual([r.request_id for r in scheduler.waiting], ["loads", "shares", "shares the rest", queued.request_id])
        self.assertEqual(scheduler.kv_cache_manager.named, {1, 5, 6, 7, 9})
        self.assertEqual(scheduler.prev_step_scheduled_req_ids, {"other", "before it", "queued"})

    def test_p1_every_output_in_flight_is_discarded_once(self) -> None:
        scheduler = Scheduler()
        hit = scheduler.add(scheduler.running, [1, 2], "hit", "RUNNING", 8, 2)
        hit.async_tokens_to_discard = 1  # of an earlier failure
        other = scheduler.add(scheduler.running, [3], "other", "RUNNING", 4, 2)
        recovery.recover(scheduler, {1}, {"hit": 1, "other": 1})
        self.assertEqual((hit.async_tokens_to_discard, hit.num_output_placeholders), (3, 0))
        self.assertEqual((other.async_tokens_to_discard, other.num_output_placeholders), (0, 2))

    def test_p1_synchronous_scheduling_skips_the_output_of_the_step(self) -> None:
        scheduler = Scheduler(asynchronous=False)
        hit = scheduler.add(scheduler.running, [1, 2], "hit", "RUNNING", 8)
        scheduler.add(scheduler.running, [3], "other", "RUNNING", 4)
        self.assertEqual(recovery.recover(scheduler, {2}, {"hit": 8, "other": 1}), {"hit"})
        self.assertEqual(hit.async_tokens_to_discard, 0)

    def test_p1_one_preempted_since_the_step_was_planned_loses_that_output(self) -> None:
        scheduler = Scheduler()
        lost = scheduler.add(scheduler.waiting, [], "lost", "PREEMPTED", 0, 1)
        queued = scheduler.add(scheduler.waiting, [], "queued", "PREEMPTED", 0, 0)
        recovery.recover(scheduler, {1}, {"lost": 8})
        self.assertEqual((lost.async_tokens_to_discard, lost.num_output_placeholders), (1, 0))
        self.assertEqual(queued.async_tokens_to_discard, 0)

    def test_p1_requests_that_wait_begin_at_their_first_bad_block(self) -> None:
        scheduler = Scheduler()
        loading = scheduler.add(scheduler.skipped_waiting, [1, 2, 3], "loading", "WAITING_FOR_REMOTE_KVS", 12)
        loaded = scheduler.add(scheduler.waiting, [4, 2, 5], "loaded", "WAITING", 12)
        nothing = scheduler.add(scheduler.waiting, [2, 6], "nothing", "WAITING", 8)
        fine = scheduler.add(scheduler.skipped_waiting, [7, 8], "fine", "WAITING_FOR_REMOTE_KVS", 8)
        recovery.recover(scheduler, {2}, {})
        self.assertEqual([r.num_computed_tokens for r in (loading, loaded, nothing, fine)], [4, 4, 0, 8])
        self.assertEqual(scheduler.failed_recving_kv_req_ids, {"loading"})
        self.assertEqual(sorted(scheduler.kv_cache_manager.tables), ["fine", "loaded", "loading"])

    def test_p1_a_load_of_several_groups_is_taken_back_whole(self) -> None:
        scheduler = Scheduler(sizes=(BLOCK, 2 * BLOCK))
        loading = scheduler.add(scheduler.skipped_waiting, ([1, 2, 3, 4], [NULL, 5]), "loading", "WAITING_FOR_REMOTE_KVS", 16)
        other = scheduler.add(scheduler.skipped_waiting, ([6, 7], [8]), "other", "WAITING_FOR_REMOTE_KVS", 8)
        running = scheduler.add(scheduler.running, ([9], [10]), "running", "RUNNING", 4)
        recovery.recover(scheduler, {5}, {"running": 1})
        self.assertEqual([r.num_computed_tokens for r in (loading, other, running)], [0, 8, 4])
        self.assertEqual(scheduler.failed_recving_kv_req_ids, {"loading"})
        self.assertEqual(scheduler.running, [running])

    def test_p1_what_comes_after_a_bad_block_is_bad_in_every_group(self) -> None:
        scheduler = Scheduler(sizes=(BLOCK, 2 * BLOCK, 1))
        scheduler.add(scheduler.running, ([1, 2, 3, 4], [NULL, 5], [NULL] * 7 + [20, 21, 22]), "hit", "RUNNING", 16)
        scheduler.add(scheduler.running, ([1, 2], [6], [30]), "before it", "RUNNING", 8)
        shares = scheduler.add(scheduler.waiting, ([7, 8, 9], [10, 5], [31]), "shares", "WAITING", 12)
        gone = scheduler.add(scheduler.waiting, (), "preempted since", "PREEMPTED", 0, 1)
        recovery.recover(scheduler, {3}, {"hit": 1, "before it": 1, "preempted since": 1})
        self.assertEqual(scheduler.kv_cache_manager.named - {NULL}, {1, 2, 6, 7, 8, 10, 20, 30, 31})
        self.assertEqual([r.request_id for r in scheduler.running], ["before it"])
        self.assertEqual((shares.num_computed_tokens, gone.async_tokens_to_discard), (0, 1))

    def test_p1_no_garbage_is_found_again_whatever_is_shared(self) -> None:
        print(f"seed {SEED}")
        drawn = random.Random(SEED)
        for _ in range(ROUNDS):
            scheduler = Scheduler(drawn.random() < 0.5)
            prefixes = [[NULL] * drawn.randrange(2)]
            for block in range(1, 30):  # a tree: each table is a path in it
                prefixes.append([*drawn.choice(prefixes), block])
            for i in range(8):
                scheduler.add(scheduler.running, drawn.choice(prefixes[1:]), str(i), "RUNNING", 8, 1)
            tables = {name: own for name, (own,) in scheduler.kv_cache_manager.tables.items()}
            invalid = set(drawn.sample(range(1, 30), 2))
            garbage = {block for path in tables.values() for at, block in enumerate(path) if invalid & set(path[: at + 1])}
            recovery.recover(scheduler, invalid, dict.fromkeys(tables, 1))
            self.assertFalse(scheduler.kv_cache_manager.named & garbage)
            left = {r.request_id for r in scheduler.running}
            self.assertEqual(left, {name for name, path in tables.items() if not garbage & set(path)})
            for name in left:
                self.assertLessEqual(set(tables[name]) - {NULL}, scheduler.kv_cache_manager.named | {NULL})


class Replacing(unittest.TestCase):
    def test_the_known_method_is_replaced_once_and_may_fail_requests(self) -> None:
        class Known(Scheduler):
            def _handle_invalid_blocks(self, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]) -> set[str]:
                return {"the original"}

        Known._handle_invalid_blocks.__module__ = recovery.SCHEDULER
        recovery.install(Known)
        replaced = Known._handle_invalid_blocks
        recovery.install(Known)
        self.assertIs(Known._handle_invalid_blocks, replaced)
        scheduler = Known()
        hit = scheduler.add(scheduler.running, [1], "hit", "RUNNING", 4, 1)
        self.assertEqual(scheduler._handle_invalid_blocks({1}, {"hit": 1}), set())
        self.assertEqual(hit.status.name, "PREEMPTED")
        scheduler.recompute_kv_load_failures = False
        self.assertEqual(scheduler._handle_invalid_blocks({1}, {"hit": 1}), {"the original"})

    def test_a_method_replaced_by_another_package_is_left(self) -> None:
        with self.assertRaises(ValueError):
            recovery.install(type("Foreign", (Scheduler,), {}))

    def test_a_source_with_one_byte_more_is_not_known(self) -> None:
        with tempfile.TemporaryDirectory(prefix="kvd-recovery-") as folder, unittest.mock.patch.object(sys, "path", [folder, *sys.path]):
            source = pathlib.Path(folder) / "kvd_recovered.py"
            source.write_text("a = 1\n")
            known = recovery.digest(("kvd_recovered",))
            self.assertEqual(len(known), 64)
            self.assertEqual(recovery.digest(("kvd_recovered",)), known)
            source.write_text("a = 1\n\n")
            self.assertNotEqual(recovery.digest(("kvd_recovered",)), known)
        self.assertEqual(recovery.digest(("kvd_recovered", "kvd_absent")), "")


if __name__ == "__main__":
    unittest.main()
