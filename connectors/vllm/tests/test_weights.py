"""What names the weights: digests of whole files, the file that remembers them, and when a name is nobody else's. Needs the module (HOOKS_MODULE) and no vLLM."""

from __future__ import annotations

import hashlib
import importlib
import os
import pathlib
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [os.environ.get("HOOKS_MODULE", "."), str(pathlib.Path(__file__).resolve().parents[1])]
import _kvd

sys.modules["kvd_vllm._kvd"] = _kvd
importlib.import_module("kvd_vllm")._kvd = _kvd  # type: ignore[attr-defined]
from kvd_vllm import digests, weights

LARGE = 5 << 20
OLD_NS = time.time_ns() - 3600 * 10**9


def data(seed: int, size: int) -> bytearray:
    return bytearray(hashlib.shake_128(bytes([seed])).digest(size))


class Folder(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="kvd-weights-")
        self.root = pathlib.Path(self.folder.name)
        self.model = self.root / "tiny"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        (self.model / "model.safetensors").write_bytes(data(1, LARGE))
        self.cache = digests.Cache(self.root / "cache" / "kvd")
        patch = unittest.mock.patch.object(digests, "RACY_NS", 50_000_000)  # the file system here is finer than any
        patch.start()
        self.addCleanup(patch.stop)

    def tearDown(self) -> None:
        self.folder.cleanup()

    def config(self, **model: Any) -> Any:
        return SimpleNamespace(
            model_config=SimpleNamespace(**{**dict(model=str(self.model), revision=None), **model}),
            cache_config=SimpleNamespace(calculate_kv_scales=False),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            load_config=SimpleNamespace(load_format="auto", download_dir=None),
        )

    def of(self, config: Any = None, vouched: str | None = None) -> weights.Weights:
        return weights.of_model(config or self.config(), vouched, "1.0", "cpu")

    def name(self, config: Any = None, vouched: str | None = None, started_ns: int | None = None) -> weights.Named:
        """By an engine that starts now, and begins to look at the files after it has read them."""
        return weights.name_weights(self.of(config, vouched), digests.Digester(self.cache), time.time_ns() + 10**9 if started_ns is None else started_ns)

    def settle(self, seconds: float = 30) -> None:
        """Wait until the files are so old that their digests are remembered."""
        end = time.monotonic() + seconds
        while not all(file.key.is_settled(time.time_ns()) for file in self.of().files):
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)


class Names(Folder):
    def test_p1_every_byte_of_a_file_is_in_the_name(self) -> None:
        """The one that a sample of 64 pieces of 4 KiB has not seen."""
        before = self.name()
        self.assertTrue(before.text.startswith("files:") and not before.private)
        self.assertEqual(self.name(), before)
        content = data(1, LARGE)
        for at in (0, LARGE // 2 + 9999, (64 << 10) + 5000, LARGE - 1):
            content[at] ^= 1
            (self.model / "model.safetensors").write_bytes(content)
            self.assertNotEqual(self.name().text, before.text)
            content[at] ^= 1
        (self.model / "model.safetensors").write_bytes(content)
        self.assertEqual(self.name(), before)

    def test_p1_what_values_depend_on_is_in_the_name_and_text_is_not(self) -> None:
        names = {self.name().text}
        for file in ("config.json", "hf_quant_config.json", "preprocessor_config.json", "modeling_own.py", "more/adapter.bin"):
            (self.model / file).parent.mkdir(exist_ok=True)
            (self.model / file).write_text('{"a":1}')
            names.add(self.name().text)
        self.assertEqual(len(names), 6)
        for file in ("README.md", "tokenizer.json", "generation_config.json"):
            (self.model / file).write_text("{}")
            names.add(self.name().text)
        self.assertEqual(len(names), 6)

    def test_p1_other_ways_to_load_the_same_files_have_other_names(self) -> None:
        names = [self.name().text]
        for change in (
            lambda c: setattr(c.load_config, "load_format", "pt"),
            lambda c: setattr(c.load_config, "load_format", "dummy"),
            lambda c: setattr(c.load_config, "model_loader_extra_config", {"pattern": "x"}),
        ):
            config = self.config()
            change(config)
            names.append(self.name(config).text)
        config.load_config.load_format = "dummy"
        config.parallel_config.tensor_parallel_size = 2  # a rank draws its own share
        names.append(self.name(config).text)
        self.assertEqual(len(set(names)), 5)
        self.assertTrue(names[2].startswith("dummy:"))

    def test_p1_a_model_that_drafts_is_in_the_name(self) -> None:
        before = self.name().text
        draft = self.root / "draft"
        shutil.copytree(self.model, draft)
        config = self.config()
        config.speculative_config = SimpleNamespace(draft_model_config=SimpleNamespace(model=str(draft)))
        with_draft = self.name(config).text
        (draft / "model.safetensors").write_bytes(data(2, LARGE))
        self.assertEqual(len({before, with_draft, self.name(config).text}), 3)

    def test_a_name_does_not_depend_on_where_the_files_lie(self) -> None:
        before = self.name().text
        shutil.copytree(self.model, self.root / "elsewhere" / "snapshot")
        self.assertEqual(self.name(self.config(model=str(self.root / "elsewhere" / "snapshot"))).text, before)

    def test_what_the_operator_vouches_for_counts_at_once(self) -> None:
        self.assertEqual(self.name(vouched="mine"), weights.Named("mine"))
        self.assertEqual(self.of(vouched="mine").files, ())
        hub = SimpleNamespace(_commit_hash="abc")
        self.assertEqual(self.name(self.config(hf_config=hub), vouched="revision"), weights.Named("commit:abc"))
        tensorizer = self.config()
        tensorizer.load_config.load_format = "tensorizer"
        self.assertEqual(self.name(tensorizer, vouched="mine"), weights.Named("mine"))

    def test_p1_what_nothing_names_is_this_engines_own(self) -> None:
        scales, transfer, merged = self.config(), self.config(), self.config()
        scales.cache_config.calculate_kv_scales = True
        transfer.weight_transfer_config = object()
        merged.load_config.model_loader_extra_config = {"qlora_adapter_name_or_path": "x"}
        nowhere = self.config(model="nobody/has-this")
        remote = self.config(model_weights="s3://bucket/model")
        strange = self.config()
        strange.load_config.load_format = "tensorizer"
        for config, word in ((scales, "scales"), (transfer, "replaced"), (merged, "merged"), (nowhere, "not in a folder"), (remote, "not in a folder"), (strange, "tensorizer")):
            one, two = self.name(config), self.name(config)
            self.assertIn(word, one.private)
            self.assertTrue(one.text.startswith("unknown:"))
            self.assertNotEqual(one.text, two.text)
        self.assertIn("scales", self.name(scales, vouched="mine").private)
        self.assertIn("no commit", self.name(nowhere, vouched="revision").private)

    def test_p1_files_changed_since_the_engines_start_name_nothing(self) -> None:
        """The engine may have read what was there before."""
        self.assertIn("changed after the engine's start", self.name(started_ns=OLD_NS).private)
        known = self.of()
        os.utime(self.model / "config.json")
        named = weights.name_weights(known, digests.Digester(self.cache), time.time_ns() + 10**9)
        self.assertIn("changed after the engine has read it", named.private)
        known = self.of()
        (self.model / "config.json").unlink()
        self.assertIn("cannot be read", weights.name_weights(known, digests.Digester(self.cache), time.time_ns() + 10**9).private)

    def test_p1_a_blobs_name_is_not_taken_for_its_digest(self) -> None:
        """Hugging Face's cache: a file that is downloaded by the engine itself is younger than the engine, and is digested as any other."""
        hub = self.root / "hub"
        (hub / "blobs").mkdir(parents=True)
        names = []
        for seed in (1, 2):
            snapshot = hub / "snapshots" / f"commit{seed}"
            snapshot.mkdir(parents=True)
            (hub / "blobs" / "0123abcd").write_bytes(data(seed, 4096))
            (snapshot / "model.safetensors").symlink_to("../../blobs/0123abcd")
            names.append(self.name(self.config(model=str(snapshot)), started_ns=OLD_NS))
        self.assertEqual([one.private for one in names], ["", ""])
        self.assertNotEqual(names[0].text, names[1].text)

    def test_the_hubs_snapshot_has_the_name_of_a_copy(self) -> None:
        with unittest.mock.patch.object(weights, "hub_folder", return_value=str(self.model)):
            self.assertEqual(self.name(self.config(model="name/on-a-hub")).text, self.name().text)

    def test_two_processes_that_see_the_same_files_say_so(self) -> None:
        before = self.of().fingerprint()
        self.assertEqual(self.of().fingerprint(), before)
        os.utime(self.model / "config.json")
        self.assertNotEqual(self.of().fingerprint(), before)
        self.assertEqual((self.of(vouched="mine").fingerprint(), self.of(vouched="other").fingerprint()), ("mine", "other"))

    def test_the_process_began_before_now_and_after_the_machine(self) -> None:
        self.assertLess(0, time.time_ns() - weights.process_start_ns())
        self.assertLess(time.time_ns() - weights.process_start_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME))


class Adapters(Folder):
    def setUp(self) -> None:
        super().setUp()
        self.adapters = weights.Adapters(digests.Digester(self.cache))
        self.addCleanup(self.adapters.close, 10)

    def request(self, **more: Any) -> Any:
        return SimpleNamespace(**{**dict(lora_name="a", lora_path=str(self.model), lora_int_id=1), **more})

    def text(self, request: Any) -> str:
        end = time.monotonic() + 60
        while not (text := self.adapters.text(request)) and time.monotonic() < end:
            time.sleep(0.01)
        return text

    def test_p1_every_byte_of_an_adapter_is_in_its_name(self) -> None:
        before = self.text(self.request())
        self.assertTrue(before.startswith("a@files:"))
        content = data(1, LARGE)
        content[LARGE // 2 + 9999] ^= 1
        (self.model / "model.safetensors").write_bytes(content)
        self.assertEqual(self.text(self.request()), before)  # the engine has it loaded
        again = self.text(self.request(lora_int_id=2))  # loaded again
        self.assertNotEqual(again, before)
        self.assertEqual(self.text(self.request(lora_name="b", lora_int_id=3)), "b" + again[1:])

    def test_p7_an_adapter_under_digestion_holds_up_no_request(self) -> None:
        with open(self.model / "huge.safetensors", "wb") as file:
            file.truncate(1 << 42)  # a hole: hours
        began = time.monotonic()
        texts = [self.adapters.text(self.request()) for _ in range(1000)]
        self.assertEqual(set(texts), {""})
        self.assertLess(time.monotonic() - began, 30)  # one of a thousand has waited for a moment
        self.adapters.close(60)
        assert self.adapters.thread
        self.assertFalse(self.adapters.thread.is_alive())

    def test_p1_an_adapter_reloaded_in_place_or_not_readable_shares_nothing(self) -> None:
        self.assertEqual(self.adapters.text(self.request(load_inplace=True)), "")
        other = weights.Adapters(digests.Digester(self.cache))
        self.addCleanup(other.close, 10)
        names = {self.text(self.request(lora_path=str(self.model) + "-gone")), weights.name_adapter(self.request(lora_path="nobody/has-this"), other.digester, other.unknown)}
        with unittest.mock.patch.object(digests.Digester, "file", side_effect=PermissionError):
            names.add(weights.name_adapter(self.request(), other.digester, "engine"))
        self.assertEqual(len(names), 3)
        self.assertTrue(all(name.startswith("a@unknown:") for name in names))

    def test_the_hubs_snapshot_of_an_adapter_has_the_name_of_a_copy(self) -> None:
        with unittest.mock.patch.object(weights, "hub_folder", return_value=str(self.model)):
            self.assertEqual(self.text(self.request(lora_path="name/on-a-hub", lora_int_id=4)), self.text(self.request()))


class Digests(Folder):
    def file(self, digester: digests.Digester | None = None) -> tuple[digests.Digester, str]:
        digester = digester or digests.Digester(self.cache)
        return digester, digester.file(str(self.model / "model.safetensors"), self.cache.load())[1]

    def memory(self) -> pathlib.Path:
        return self.cache.folder / "digests"

    def test_a_digest_is_remembered_and_not_computed_again(self) -> None:
        self.settle()
        first, digest = self.file()
        self.assertEqual((first.bytes, first.known), (LARGE, 0))
        second, again = self.file()
        self.assertEqual((second.bytes, second.known, again), (0, 1, digest))
        self.assertEqual([stat.S_IMODE(path.stat().st_mode) for path in (self.cache.folder, self.memory())], [0o700, 0o600])
        content = data(1, LARGE)
        content[LARGE // 2] ^= 1
        (self.model / "model.safetensors").write_bytes(content)
        third, changed = self.file()
        self.assertEqual((third.bytes, third.known), (LARGE, 0))
        self.assertNotEqual(changed, digest)

    def test_p1_a_file_just_written_is_not_remembered(self) -> None:
        """It may be written once more without a change of its times."""
        (self.model / "model.safetensors").write_bytes(data(2, 4096))
        with unittest.mock.patch.object(digests, "RACY_NS", 3600 * 10**9):
            _, digest = self.file()
        self.assertEqual(self.cache.load(), {})
        self.assertEqual(self.file()[1], digest)

    def test_p1_a_file_changed_during_its_digest_is_read_again(self) -> None:
        self.settle()
        path, changes = self.model / "model.safetensors", [data(2, LARGE), data(3, LARGE // 2)]
        digester = digests.Digester(self.cache)

        class Slow:
            def file(slow, fd: int) -> bytes | None:
                digest = _kvd.Digest().file(fd)
                if changes:
                    path.write_bytes(changes.pop())
                return digest

        digester.engine = Slow()
        key, digest = digester.file(str(path), {})
        self.assertEqual((key.size, digest), (LARGE, _kvd.Digest().file(os.open(path, os.O_RDONLY)).hex()))
        self.assertIn(self.cache.load(), ({}, {key: digest}))  # on a busy machine the last change may be old enough
        changes.extend(data(seed, LARGE) for seed in range(4, 4 + digests.TRIES))
        with self.assertRaises(digests.Changing):
            digester.file(str(path), {})

    def test_p10_what_others_may_have_written_is_not_believed(self) -> None:
        self.settle()
        _, digest = self.file()
        self.assertEqual(len(self.cache.load()), 1)
        good = self.memory().read_text()
        lie = good.replace(digest, "0" * 32)

        def believed() -> bool:
            found = self.file()[1]
            self.assertIn(found, (digest, "0" * 32))
            return found != digest

        self.memory().write_text(lie)
        self.assertTrue(believed())  # the test's own lie, in a file that is the user's
        for mode in (0o620, 0o602):
            self.memory().chmod(mode)
            self.assertFalse(believed())
            self.memory().write_text(lie)
        self.memory().chmod(0o600)
        for mode in (0o720, 0o702, 0o777):
            self.cache.folder.chmod(mode)
            self.assertFalse(believed())
        self.cache.folder.chmod(0o700)
        (self.root / "lie").write_text(lie)
        self.memory().unlink()
        self.memory().symlink_to(self.root / "lie")
        self.assertFalse(believed())
        real = self.cache.folder.rename(self.root / "elsewhere")
        (real / "digests").unlink(missing_ok=True)
        (real / "digests").write_text(lie)
        self.cache.folder.symlink_to(real)
        self.assertFalse(believed())
        if os.geteuid() == 0:
            self.cache.folder.unlink()
            shutil.copytree(real, self.cache.folder)
            os.chown(self.memory(), 12345, -1)
            self.assertFalse(believed())
            os.chown(self.cache.folder, 12345, -1)
            self.assertFalse(believed())

    def test_p10_garbage_is_computed_again(self) -> None:
        self.settle()
        _, digest = self.file()
        good = self.memory().read_bytes()
        for bad in (b"", b"\0" * 100, good[:-20], b"kvd digests 2\n" + good.split(b"\n", 1)[1], digests.HEADER.encode() + b"1 2 3\n\xff\xfe\n" + b"9" * 4000, good + b"9" * digests.MOST_BYTES):
            self.memory().write_bytes(bad)
            self.assertEqual(self.file()[1], digest)
        self.memory().unlink()
        os.mkfifo(self.memory())
        self.assertEqual(self.file()[1], digest)
        self.memory().unlink()
        self.memory().mkdir()
        self.assertEqual(self.file()[1], digest)

    def test_p7_without_a_place_to_remember_digests_are_computed(self) -> None:
        self.settle()
        for folder in (pathlib.Path("/proc/nobody/kvd"), self.model / "config.json" / "kvd", self.root / "lock"):
            self.cache = digests.Cache(folder)
            if folder.name == "lock":  # somebody has left something there that is no file
                folder.mkdir(mode=0o700)
                (folder / "lock").mkdir()
            self.assertEqual((self.cache.load(), self.file()[0].bytes), ({}, LARGE))
        with unittest.mock.patch.dict(os.environ, {"XDG_CACHE_HOME": "not/absolute", "HOME": "/home/me"}):
            self.assertEqual(digests.default_folder(), pathlib.Path("/home/me/.cache/kvd"))

    def test_p7_a_stopped_process_with_the_lock_holds_up_no_other(self) -> None:
        self.settle()
        self.file()
        holder = subprocess.Popen([sys.executable, "-c", "import fcntl,sys,time; f=open(sys.argv[1]); fcntl.flock(f,2); print(1,flush=True); time.sleep(600)", str(self.cache.folder / "lock")], stdout=subprocess.PIPE)
        try:
            assert holder.stdout
            holder.stdout.readline()
            holder.send_signal(signal.SIGSTOP)
            self.memory().unlink()
            with unittest.mock.patch.object(digests, "LOCK_PAUSE_S", 0.001):
                self.assertEqual(self.file()[0].bytes, LARGE)
            self.assertEqual(self.cache.load(), {})
        finally:
            holder.kill()
            holder.communicate()

    def test_several_processes_lose_nothing_of_each_other(self) -> None:
        code = "import sys; sys.path.insert(0, sys.argv[1]); import test_weights as t; t.digests.LOCK_TRIES = 10000; c = t.digests.Cache(t.pathlib.Path(sys.argv[2])); [c.add(t.digests.Key(int(sys.argv[3]), i, 1, 2, 3), 'a' * 32) for i in range(20)]"
        here = str(pathlib.Path(__file__).resolve().parent)
        running = [subprocess.Popen([sys.executable, "-c", code, here, str(self.cache.folder), str(n)]) for n in range(4)]
        self.assertEqual([process.wait() for process in running], [0] * 4)
        self.assertEqual(len(self.cache.load()), 80)

    def test_p5_what_is_remembered_is_bounded_and_the_oldest_goes(self) -> None:
        with unittest.mock.patch.object(digests, "MOST", 3):
            for i in range(5):
                self.assertTrue(self.cache.add(digests.Key(1, i, 1, 2, 3), f"{i:032x}"))
        self.assertEqual([key.inode for key in self.cache.load()], [2, 3, 4])

    def test_p5_a_digest_is_cancelled_by_another_thread(self) -> None:
        with open(self.model / "huge.safetensors", "wb") as file:
            file.truncate(1 << 42)  # a hole: hours
        digester = digests.Digester(self.cache)
        ended: list[BaseException] = []

        def run() -> None:
            try:
                digester.file(str(self.model / "huge.safetensors"), {})
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(0.05)
        digester.cancel()
        thread.join(60)
        self.assertFalse(thread.is_alive())
        self.assertIsInstance(ended[0], digests.Cancelled)

    def test_p10_what_is_no_file_has_no_digest(self) -> None:
        os.mkfifo(self.model / "pipe.bin")
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(self.model / "socket.bin"))
        for name in ("pipe.bin", "socket.bin", "."):
            with self.assertRaises(OSError):
                digests.Digester(self.cache).file(str(self.model / name), {})
        listening.close()
        self.assertEqual(len(self.of().files), 2)


if __name__ == "__main__":
    unittest.main()
