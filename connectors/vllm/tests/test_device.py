"""Blocks in memory of a GPU, with a fake device of the daemon: what is used twice is saved there and loaded from there. Driven as vLLM drives it, without vLLM (rig.py)."""

from __future__ import annotations

import unittest

from rig import Daemon, Engine, Engines, Request, _kvd, prompt, until


class Device(Engines):
    """The daemon has memory of fake-0."""

    with_daemon = False  # its own

    @classmethod
    def setUpClass(cls) -> None:
        cls.daemon = Daemon(gpu__size="16MiB", gpu__slab_size="4MiB", gpu__devices="fake-0")
        cls.addClassCleanup(cls.daemon.stop)
        cls.socket = cls.daemon.socket

    def engine(self, name: str | None = None, **options: object) -> Engine:
        engine = super().engine(name, **options)
        engine.wait()
        return engine

    def use(self, engine: Engine, name: str, seed: int, table: list[int]) -> int:
        """A request from its first step to its end; tokens that came from the store."""
        request = Request(name, prompt(seed, 200))
        tokens = engine.prefill(request, table)
        self.assertTrue(engine.holds(request, table, *range(6)))
        engine.idle(lambda: engine.scheduler.stats()["puts_open"] == 0)
        engine.scheduler.finish_request(request, (table,))
        return tokens

    def test_what_is_used_twice_is_loaded_from_the_device(self) -> None:
        engine = self.engine()
        self.assertEqual(engine.scheduler.set_device("fake-0"), _kvd.OK)
        self.assertEqual(self.use(engine, "a", 1, list(range(1, 8))), 0)

        def is_there() -> bool:
            """The daemon may still be starting the device: only then nothing was saved there."""
            name = f"b{len(names)}"
            names.append(name)
            self.assertEqual(self.use(engine, name, 1, list(range(11, 18))), 192)
            return engine.scheduler.stats()["gpu_blocks"] == 6

        names: list[str] = []
        self.assertTrue(until(is_there, seconds=60, pause=0.1))
        before = engine.scheduler.stats()
        self.assertEqual(self.use(engine, "c", 1, list(range(21, 28))), 192)
        after = engine.scheduler.stats()
        self.assertEqual(after["gpu_tokens"] - before["gpu_tokens"], 192)
        self.assertEqual((after["gpu_blocks"], after["loads_failed"], after["save_lost"]), (6, 0, 0))

        # Another engine of the same device finds it too, and one of none loads from host memory.
        other = self.engine()
        self.assertEqual(other.scheduler.set_device("fake-0"), _kvd.OK)
        until(lambda: self.use(other, f"d{len(names)}", 1, list(range(1, 8))) == 192 and (other.scheduler.stats()["gpu_tokens"] > 0 or names.append("")), pause=0.1)
        self.assertGreater(other.scheduler.stats()["gpu_tokens"], 0)
        plain = self.engine()
        self.assertEqual(self.use(plain, "e", 1, list(range(1, 8))), 192)
        self.assertEqual(plain.scheduler.stats()["gpu_tokens"], 0)

    def test_a_device_that_the_daemon_has_not_changes_nothing(self) -> None:
        engine = self.engine()
        self.assertEqual(engine.scheduler.set_device("GPU-00000000-0000-0000-0000-000000000000"), _kvd.OK)
        for i, name in enumerate("abc"):
            self.assertEqual(self.use(engine, name, 2, list(range(1 + 10 * i, 8 + 10 * i))), 192 if i else 0)
        stats = engine.scheduler.stats()
        self.assertEqual((stats["gpu_tokens"], stats["gpu_blocks"], stats["loads_failed"]), (0, 0, 0))

    def test_the_device_is_set_once_and_only_for_the_engine_s_own_hashes(self) -> None:
        engine = self.engine()
        self.assertEqual(_kvd.status_name(engine.scheduler.set_device("")), "ERR_ARG")
        self.assertEqual(engine.scheduler.set_device("fake-0"), _kvd.OK)
        self.assertEqual(_kvd.status_name(engine.scheduler.set_device("fake-1")), "ERR_ARG")
        self.assertEqual(_kvd.status_name(self.engine(foreign=0).scheduler.set_device("fake-0")), "ERR_UNSUPPORTED")


if __name__ == "__main__":
    unittest.main()
