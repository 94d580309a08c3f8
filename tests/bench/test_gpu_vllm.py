"""bench/gpu/vllm without a GPU: every configuration is built and run with engines that have no model, and what came of it is judged by its goals."""

from __future__ import annotations

import sys

try:
    import json
    import os
    import re
    import shutil
    import subprocess
    import tarfile
    import tempfile
    import time
    import unittest
    import zipfile
    from pathlib import Path
except ModuleNotFoundError as error:
    print(f"# SKIP: this Python has no standard library ({error})")
    sys.exit(77)

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench" / "gpu" / "vllm"
sys.path[:0] = [str(BENCH), str(ROOT / "connectors" / "vllm")]

import goals  # noqa: E402
from configurations import configurations  # noqa: E402
from kvd_vllm import options  # noqa: E402

KINDS = ("none-v1", "ring-v1", "ring-v2", "native-v2", "kvd-v1", "disk-v2", "full-v1", "check-v2", "trace-v2", "profile-v2", "steps-v2", "weights-v2", "pd-v2", "pd-v2-hbm", "check-v1-pd", "check-v2-pd-hbm", "push-v2-hbm", "peers-v2-hbm", "check-v2-peers-hbm", "steps-v2-hbm")  # one of each


class Runs(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="kvd-bench-")
        self.addCleanup(folder.cleanup)
        self.at = Path(folder.name)
        (self.at / "models" / "tiny_drawn").mkdir(parents=True)
        for name in ("done", "model.safetensors"):
            (self.at / "models" / "tiny_drawn" / name).touch()
        (self.at / "kvd" / "bin").mkdir(parents=True)
        slab = "import os, sys, time; os.truncate(os.memfd_create('kvd-slab'), 1 << 20); open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(100)"
        for name, text in (("kvd", f'exec {sys.executable} -c "{slab}" "$0.pid"'), ("kvctl", "echo kvd_blocks 1")):
            program = self.at / "kvd" / "bin" / name
            program.write_text(f"#!/bin/sh\n{text}\n")
            program.chmod(0o755)

    def environment(self, **more: str) -> dict[str, str]:
        return {"PYTHONPATH": str(ROOT / "tests" / "bench" / "fake"), "PATH": os.environ["PATH"], "PYTHONHASHSEED": "0", "FAKE_KVD_PID": str(self.at / "kvd" / "bin" / "kvd.pid"), **more}

    def command(self, *arguments: str) -> list[str]:
        folders = [f"--{name}={self.at / name}" for name in ("kvd", "models", "work", "out")]
        small = ["--shape=tiny", '--sizes={"40": 2, "100": 2, "200": 1}', "--prompts=3", "--rounds=2", "--pause=0", "--caution=0", "--least=0"]
        return [sys.executable, str(BENCH / "bench.py"), *folders, *small, *arguments]

    def run_bench(self, *arguments: str, **environment: str) -> tuple[int, str]:
        done = subprocess.run(self.command(*arguments), env=self.environment(**environment), capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout + done.stderr

    def results(self) -> dict:
        return json.loads((self.at / "out" / "results.json").read_text())["results"]

    def test_every_kind_of_configuration_runs_to_its_end(self) -> None:
        status, text = self.run_bench(*KINDS)
        self.assertEqual(status, 0, text)
        results = self.results()
        self.assertEqual(set(results), set(KINDS))
        for name in KINDS:
            configuration = configurations(1)[name]
            engines = list(configuration.ring) or [at for at, phases in configuration.engines if phases != ["daemon"]]
            engines += list(configuration.pair)
            for at in engines:
                self.assertTrue(results[name][at]["done"], (name, at))
        table = (self.at / "out" / "goals.md").read_text()
        self.assertNotIn("failed", table)
        for runner in ("v1", "v2"):
            self.assertEqual([results[f"ring-{runner}"][member]["rounds"] for member in ("none", "nothing", "kvd")], [2, 2, 2])
            self.assertEqual(len(results[f"ring-{runner}"]["kvd"]["cold 100"]["rounds"]), 2)
        self.assertEqual(results["steps-v2"]["kvd"]["between kernels"], {"kernels": 4, "mean us": 0.375, "median us": 0.5})
        self.assertIn("check-v2, daemon restarted | 3 of 3 | all equal, all found | met", table)
        self.assertIn("check-v1-pd, handed over at once | 2 of 2 | all equal, all came | met", table)
        self.assertIn("handed over one after the other, 100, v2", table)
        self.assertRegex(table, r"handed over one after the other in GPU memory, 100, v2 \| [0-9.]+ ms after the last step, in host memory [0-9.]+, own hit [0-9.]+ \|")
        self.assertEqual(results["check-v2-pd-hbm"]["decode"]["handed over at once"]["in memory of"], "fake-0")
        self.assertEqual(results["check-v1-pd"]["decode"]["handed over at once"]["in memory of"], "fake-0")
        self.check_gpu_memory(results, table)

    def check_gpu_memory(self, results: dict, table: str) -> None:
        for place in ("another GPU", "its own GPU", "host memory"):
            found = results["peers-v2-hbm"]["second"][f"found in {place}, 100"]
            self.assertEqual((found["from there"], found["missed"], len(found["each"])), ([96, 96], 0, 2), place)
        self.assertRegex(table, r"hit in another engine's GPU, 100, v2 \| [0-9.]+ ms, .*, 0 of 2 missed \|")
        self.assertIn("check-v2-peers-hbm, answers from another GPU | 3 of 3 | all equal, all came | met", table)
        pushed = results["push-v2-hbm"]["decode"]
        self.assertEqual([pushed[f"prefill {way} 100"]["cached"] for way in ("handed over", "alone", "in host memory")], [[0], [0], [0]])
        self.assertEqual(pushed["prefill in GPU memory 100"], 2)
        rounds = pushed["beside 3 x 100 handed over"]["rounds"]
        self.assertEqual([one["missed"] for one in rounds], [0] * 5)
        self.assertGreater(min(one["beside"] for one in rounds), 0)
        self.assertRegex(table, r"prefill handed over in GPU memory, 100, v2 \| [-+0-9.]+ % \(.*, 2 rounds\) of")
        steps = results["steps-v2-hbm"]
        self.assertEqual([steps[member][f"promoted blocks {i}"] for member in ("host", "kvd") for i in (0, 1)], [0, 0, 18, 18])
        self.assertEqual(len(steps["kvd"]["step beside promotions"]["rounds"]), 2)

    def test_loads_that_fail_are_told_by_fault(self) -> None:
        status, text = self.run_bench("failed-v1", "failed-v2-plain-graph", "--prompts=10", "--beside=1")
        self.assertEqual(status, 0, text)
        for name in ("failed-v1", "failed-v2-plain-graph"):
            found = self.results()[name]["first engine"]
            self.assertEqual(found["bits flipped"], 16)
            for fault in ("flips", "lease", "deadline", "kill"):
                after = found[f"after {fault}"]
                self.assertEqual((after["right"], after["of"], after["asks"], after["asks with a failed load"]), (10, 10, 3, 3), (name, fault))
        self.assertIn("failed-v1, after kill | 10 of 10, 3 loads failed, in 3 of 3 asks | all equal, a load failed | met", (self.at / "out" / "goals.md").read_text())

    def test_a_wrong_answer_and_a_fault_without_a_failed_load_are_found(self) -> None:
        for environment, row in (("FAKE_VLLM_DROPS", "after flips | 0 of 10"), ("FAKE_VLLM_LOADS_ALL", "after lease | 10 of 10, 0 loads failed")):
            status, text = self.run_bench("failed-v2", "--prompts=10", **{environment: "1"})
            self.assertEqual(status, 1, text)
            self.assertIn(f"failed-v2, {row}", text)
            self.assertIn("MISSED", text)

    def test_a_prompt_that_is_not_handed_over_is_found(self) -> None:
        status, text = self.run_bench("check-v2-pd", FAKE_VLLM_WAITS_S="0")
        self.assertEqual(status, 1, text)
        self.assertIn("check-v2-pd, handed over at once | 2 of 2 | all equal, all came | MISSED", (self.at / "out" / "goals.md").read_text())

    def test_a_hit_that_is_not_in_the_other_gpu_is_missed(self) -> None:
        status, text = self.run_bench("check-v2-peers-hbm", "peers-v2-hbm", FAKE_VLLM_ONE_GPU="1")
        self.assertEqual(status, 1, text)
        table = (self.at / "out" / "goals.md").read_text()
        self.assertIn("check-v2-peers-hbm, answers from another GPU | 3 of 3 | all equal, all came | MISSED", table)
        self.assertRegex(table, r"hit in another engine's GPU, 100, v2 \| in its own GPU [0-9.]+, in host memory [0-9.]+, 2 of 2 missed \| .* \| MISSED")

    def test_what_fails_or_finds_no_time_is_said_and_the_rest_is_kept(self) -> None:
        self.assertEqual(self.run_bench("none-v2")[0], 0)
        status, text = self.run_bench("ring-v1", "native-v2", FAKE_VLLM_FAILS="Nothing")
        self.assertEqual(status, 1, text)
        self.assertIn("this engine does not start", text)
        self.assertIn("failed", self.results()["ring-v1"]["nothing"])
        self.assertTrue(self.results()["native-v2"]["first engine"]["done"])
        self.assertTrue(self.results()["none-v2"]["first engine"]["done"])
        status, text = self.run_bench("kvd-v2", "--seconds=5", "--caution=1")
        self.assertEqual(status, 1)  # what failed before is still in the table
        self.assertIn("kvd-v2: no time left: it takes about", text)

    def test_an_engine_that_dies_in_its_turn_takes_no_time_from_the_others(self) -> None:
        status, text = self.run_bench("ring-v2", "native-v2", "--seconds=30", FAKE_VLLM_DIES="Nothing")
        self.assertEqual(status, 1, text)
        self.assertEqual(self.results()["ring-v2"]["nothing"]["failed"], 3)
        self.assertEqual(self.results()["ring-v2"]["none"]["rounds"], 1)
        self.assertTrue(self.results()["native-v2"]["first engine"]["done"], text)

    def test_one_that_is_terminated_leaves_nothing_behind(self) -> None:
        pids = [self.at / "engine.pid", self.at / "kvd" / "bin" / "kvd.pid"]
        bench = subprocess.Popen(self.command("kvd-v2"), env=self.environment(FAKE_VLLM_HANGS=str(pids[0])), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 60
        while not all(pid.exists() and pid.read_text() for pid in pids) and bench.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        bench.terminate()
        self.assertEqual(bench.wait(60), 143)
        for pid in pids:
            with self.assertRaises(ProcessLookupError):
                os.kill(int(pid.read_text()), 0)

    def test_the_two_parts_fit_into_ten_minutes_each(self) -> None:
        for part in ("part1", "part2", "check", "check-async", "check-failed", "check-failed-sync", "full", "pd", "pd-hbm", "push-hbm", "peers-hbm", "steps-hbm", "check-pd", "check-pd-hbm", "check-peers-hbm", "check-pd-tp"):
            done = subprocess.run(["bash", str(BENCH / "run.sh"), part, "--dry-run"], env={"PATH": os.environ["PATH"], "HOME": str(self.at)}, capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            last = done.stdout.splitlines()[-1].split()
            self.assertLess(int(last[1]), 620, done.stdout)

    def test_the_connector_knows_every_option_it_is_given(self) -> None:
        for name, configuration in configurations(1).items():
            for connector in [configuration.connector, *configuration.ring.values()]:
                if connector and "socket" in connector.get("kv_connector_extra_config", {}):
                    self.assertEqual(options.parse(connector["kv_connector_extra_config"])[1], [], name)


class Connector(unittest.TestCase):
    def test_methods_that_benches_and_tests_call_exist(self) -> None:
        """Their connectors run in real engines only, on GPUs some of them."""
        sources = "".join(path.read_text() for path in (ROOT / "connectors" / "vllm" / "src").glob("*.c"))
        methods = set(re.findall(r'\{"([a-z_]+)", [^}]*METH_', sources)) | set(re.findall(r"\bX\(([a-z_]+), \d", sources))
        self.assertIn("is_ready", methods)
        for folder in (BENCH, ROOT / "tests" / "engines", ROOT / "bench" / "engines"):
            for path in folder.glob("*.py"):
                called = set(re.findall(r"\b_c\.([a-z_]+)\(", path.read_text()))
                self.assertLessEqual(called, methods, path)


class Bundles(unittest.TestCase):
    """Both run.sh unpack a bundle once, and another one that has come in its place."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="kvd-bench-")
        self.addCleanup(folder.cleanup)
        self.at = Path(folder.name)
        (self.at / "build").mkdir()
        (self.at / "build" / "gpu_nn").write_text("")
        (self.at / "build" / "gpu_nn").chmod(0o755)  # there is nothing to build

    def bundle(self, number: int) -> str:
        root = self.at / "kvd-0-none"
        (root / "bin").mkdir(parents=True, exist_ok=True)
        (root / "wheels").mkdir(exist_ok=True)
        program = root / "bin" / "kvd-gpu-load"
        program.write_text(f"#!/bin/sh\necho bundle {number}\n")
        program.chmod(0o755)
        with zipfile.ZipFile(root / "wheels" / "kvd_vllm-0-none.whl", "w") as wheel:
            wheel.writestr("number", str(number))
        with tarfile.open(self.at / "kvd.tar.xz", "w:xz") as archive:
            archive.add(root, root.name)
        return str(self.at / "kvd.tar.xz")

    def run_script(self, script: str, *arguments: str) -> str:
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.at), "BUILD": str(self.at / "build"), "BUNDLE": str(self.at / "kvd.tar.xz")}
        done = subprocess.run(["bash", str(ROOT / script), *arguments], env=environment, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def test_what_runs_is_of_the_bundle_that_is_there(self) -> None:
        if shutil.which("xz") is None or not Path("/usr/local/cuda/bin/nvcc").exists():
            print("# SKIP: xz unpacks a bundle, and nvcc builds beside it: one is not there")
            self.skipTest("no xz, or no nvcc")
        for number in (1, 1, 2):
            self.bundle(number)
            self.assertIn(f"bundle {number}\n", self.run_script("bench/gpu/run.sh", "kvx", str(self.at / "out")))
            self.run_script("bench/gpu/vllm/run.sh", "none-v2", "--dry-run")
            self.assertEqual((self.at / "k" / "site" / "number").read_text(), str(number))


class Goals(unittest.TestCase):
    def verdicts(self, results: dict) -> dict[str, str]:
        return {line.split("|")[1].strip(): line.split("|")[4].strip() for line in goals.table(results).splitlines()[2:]}

    def test_a_goal_is_met_missed_or_not_run(self) -> None:
        def hits(ms: list[float]) -> dict:
            return {"first engine": {f"hit {n}": {"ms": value} for n, value in zip(("1030", "10250", "32780"), ms)} | {"8 x 10250 hit": {"ms": ms[1] * 8}}}

        def member(extra: float) -> dict:
            what = {"cold 1030": 30.0, "cold 10250": 270.0, "cold 32780": 1200.0, "gpu 1030": 9.0, "decode step, one request": 4.8}
            return {name: {"ms": ms, "rounds": [ms * (1 + extra), ms * (1 + extra) * 1.01]} for name, ms in what.items()}

        together = {"48 x 1030 hit": {"ms": 180.0, "mean": 120.0, "rounds": [[180.0, 120.0, [1024]], [240.0, 190.0, [0, 1024]]]}, "8 x 10250 hit beside one that generates": {"step": 4.8, "beside": 5.7, "longest": 17.2}}
        disk = {"daemon restarted": {"hit 1030": {"ms": 30.3}, "fresh 1030": {"ms": 30.0}, "hit 10250": {"ms": 300.0}, "fresh 10250": {"ms": 270.0}}}
        row = self.verdicts(
            {
                "kvd-v1": {"first engine": hits([12.0, 31.0, 84.0])["first engine"] | together},
                "native-v1": hits([17.0, 40.0, 83.0]),
                "ring-v2": {"none": member(0), "nothing": member(0.001), "kvd": member(0.002)},
                "ring-v1": {"none": member(0), "kvd": member(0.06)},
                "disk-v2": disk,
            }
        )
        self.assertEqual([row[f"hit {n}, v1, first engine"] for n in (1030, 10250, 32780)], ["met", "MISSED", "MISSED"])
        self.assertEqual(row["hit 1030, v1, engine restarted"], "not run")
        self.assertEqual(row["8 x 10250 hit, v1"], "met")
        self.assertEqual([row[f"{what}, v1"] for what in ("short hits together", "beside long hits")], ["MISSED", "met"])
        self.assertEqual(row["beside long hits, v2"], "not run")
        self.assertEqual(row["cold 10250, v2: beside no connector"], "met")
        self.assertEqual(row["cold 10250, v1: beside no connector"], "MISSED")
        self.assertEqual(row["gpu 1030, v1: beside no connector"], "MISSED")
        self.assertEqual(row["gpu 10250, v1: beside no connector"], "not run")
        self.assertEqual(row["from disk 1030, v2, cost model on"], "met")
        self.assertEqual(row["from disk 10250, v2, cost model on"], "MISSED")

    def test_goals_of_gpu_memory(self) -> None:
        def prefill(handed: float, in_gpu: int, cached: int = 0) -> dict:
            each = {"handed over": handed, "alone": 100.0, "in host memory": 101.0}
            return {f"prefill {way} 1030": {"ms": ms, "each": [ms, ms, ms], "cached": [cached]} for way, ms in each.items()} | {"prefill in GPU memory 1030": in_gpu}

        def beside(ms: float, missed: int) -> dict:
            return {"beside 3 x 10250 handed over": {"ms": ms, "rounds": [{"alone": 5.0, "beside": ms, "all steps": ms + 0.2, "longest": 9.0, "missed": missed}] * 3}}

        def steps(ms: float, blocks: int) -> dict:
            return {"host": {"step beside promotions": {"rounds": [5.0, 5.0]}, "step alone": {"rounds": [5.0, 5.0]}}, "kvd": {"step beside promotions": {"rounds": [ms, ms]}, "step alone": {"rounds": [5.0, 5.0]}, "promoted blocks 0": blocks}}

        def other(ratio: float, missed: int) -> dict:
            return {"ms": 10 * ratio, "own": 10.0, "ratio": ratio, "each": [], "from there": [1024] * 6, "missed": missed}

        goal = {"prefill": "prefill handed over in GPU memory, 1030", "beside": "steps beside prompts that come in", "steps": "steps beside saves in GPU memory"}
        cases = (
            (prefill(101.9, 3) | beside(5.1, 0), steps(5.04, 9), ("met", "met", "met")),
            (prefill(102.1, 3) | beside(5.2, 0), steps(5.06, 9), ("MISSED", "MISSED", "MISSED")),
            (prefill(100.0, 2) | beside(5.0, 1), steps(5.0, 0), ("MISSED", "MISSED", "MISSED")),
            (prefill(100.0, 3, 1024), steps(5.0, 9), ("MISSED", "not run", "met")),
        )
        for pushed, stepped, wanted in cases:
            row = self.verdicts({"push-v2-hbm": {"decode": pushed}, "steps-v2-hbm": stepped})
            self.assertEqual(tuple(row[f"{what}, v2"] for what in goal.values()), wanted)
            self.assertEqual({row[f"{what}, v1"] for what in goal.values()}, {"not run"})
        hits = {f"found in another GPU, {n}": found for n, found in ((1030, other(1.5, 0)), (10250, other(1.51, 0)), (32780, other(1.2, 1)))}
        row = self.verdicts({"peers-v2-hbm": {"second": hits | {"found in its own GPU, 1030": other(1.0, 0)}}})
        self.assertEqual([row[f"hit in another engine's GPU, {n}, v2"] for n in (1030, 10250, 32780)], ["met", "MISSED", "MISSED"])


if __name__ == "__main__":
    unittest.main()
