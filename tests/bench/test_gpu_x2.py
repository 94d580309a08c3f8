"""scripts/gpu-x2 without a GPU: it names every row, says why one does not run, and judges what result files have."""

from __future__ import annotations

import sys

try:
    import io
    import json
    import os
    import re
    import shutil
    import subprocess
    import tarfile
    import tempfile
    import unittest
    import zipfile
    from pathlib import Path
except ModuleNotFoundError as error:
    print(f"# SKIP: this Python has no standard library ({error})")
    sys.exit(77)

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench" / "gpu")]

from two_gpus_rows import ROWS  # noqa: E402

WANTED = {  # of what needs two GPUs: words of a row's description, and rows that measure it
    "MoE slice": 1,
    "dispatch + combine over NVLink": 1,
    "all_to_all_single": 1,
    "DBO over `host`": 1,
    "DBO over NVLink": 1,
    "EP over two GPUs": 1,
    "P to D of 10,250 / 32,780 tokens": 4,
    "tier of 6 GiB": 2,
    "tier of 20 GiB": 2,
    ": hits in another engine's GPU, runner": 2,
    "prefill slowed by pushing; decode beside it": 2,
    "two network namespaces": 1,
    "answers of hand-overs in GPU memory": 2,
    "300 kills": 1,
    "peer's memory": 1,
    "flag": 1,
}
RATE = '{{"name":"{}","value":{},"unit":"GB/s","reference":"a copy","reference_value":400,"ratio":{},"rounds":5,"spread":0.01{}}}'


class TwoGpus(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="kvd-gpu-x2-")
        self.addCleanup(folder.cleanup)
        self.at = Path(folder.name)
        for name in ("bin", "build", "work", "out", "home/v"):
            (self.at / name).mkdir(parents=True)
        (self.at / "home" / "v" / "done").touch()  # no real vLLM is unpacked, where this machine has one
        self.program("bin/nvidia-smi", 'case "$*" in *query*) printf "fake 0, 80 GiB\\nfake 1, 80 GiB\\n" ;; esac')
        self.program("build/gpu_copy", "exit 1")
        self.program("build/gpu_ep", "exit 1")
        self.program("build/gpu_ep_kill", "exit 1")
        self.program("build/gpu_nn", "exit 1")
        self.program("build/gpu_probe", f"while [ $1 != --out ]; do shift; done; echo '{RATE.format('GPU 0 to GPU 1', 390.5, 0.976, '')}' >$2")

    def program(self, name: str, text: str) -> None:
        (self.at / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.at / name).chmod(0o755)

    def bundle(self) -> None:
        wheel = io.BytesIO()
        with zipfile.ZipFile(wheel, "w") as files:
            files.writestr("kvd_vllm/_kvd.py", "version = 'fake'")
        slab = "import os, sys, time; os.truncate(os.memfd_create('kvd-slab'), 1 << 20); time.sleep(300)"
        files_of = {
            "bin/kvd": f'#!/bin/sh\nexec {sys.executable} -c "{slab}"\n',
            "bin/kvctl": "#!/bin/sh\necho kvd_blocks 1\n",
        }
        with tarfile.open(self.at / "kvd.tar.xz", "w:xz") as archive:
            for name, data in [*((name, text.encode()) for name, text in files_of.items()), ("wheels/kvd_vllm-0-none.whl", wheel.getvalue())]:
                member = tarfile.TarInfo(f"kvd-0/{name}")
                member.size, member.mode = len(data), 0o755
                archive.addfile(member, io.BytesIO(data))

    def run_script(self, *arguments: str, gpus: bool = True) -> tuple[int, str]:
        path = f"{self.at / 'bin'}:{os.environ['PATH']}" if gpus else os.environ["PATH"]
        environment = {"PATH": path, "HOME": str(self.at / "home"), "PYTHONPATH": str(ROOT / "tests" / "bench" / "fake"), "BUNDLE": str(self.at / "kvd.tar.xz"), "BUILD": str(self.at / "build")}
        command = [str(ROOT / "scripts" / "gpu-x2"), f"--work={self.at / 'work'}", f"--out={self.at / 'out'}", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
        return done.returncode, done.stdout + done.stderr

    def rows(self) -> dict[str, dict]:
        return {row["row"]: row for row in json.loads((self.at / "out" / "gpu-x2.json").read_text())["rows"]}

    def verdicts(self, name: str) -> dict[str, str]:
        return {line["what"]: line["verdict"] for line in self.rows()[name]["lines"]}

    def ran(self, name: str, status: str = "ended", results: dict | None = None) -> Path:
        """As a call has left it: that of this machine, whose name an earlier call has said."""
        out = self.at / "work" / name
        out.mkdir(exist_ok=True)
        machine = json.loads((self.at / "work" / "probe" / "row.json").read_text())["machine"]
        (out / "row.json").write_text(json.dumps({"status": status, "seconds": 1, "at": "now", "command": "x", "machine": machine}))
        if results is not None:
            (out / "results.json").write_text(json.dumps({"results": results}))
        return out

    def test_a_dry_run_names_every_row_and_why_one_does_not_run(self) -> None:
        status, text = self.run_script("--dry-run", gpus=False)
        self.assertEqual(status, 0, text)
        for words, count in WANTED.items():
            self.assertEqual(sum(words in line for line in text.splitlines()), count, words)
        self.assertIn("two GPUs: needs two GPUs, this machine has 0", text)
        for row in ROWS:
            if row.command:
                self.assertRegex(text, rf"(?m)^{row.name} +runs, about {row.seconds} s")
        planned = re.findall(r"(?m)^call \d+ of 540 s: (.*)$", text)
        self.assertEqual(sorted(", ".join(planned).split(", ")), sorted(row.name for row in ROWS if row.command))

    def test_without_two_gpus_nothing_runs_and_every_row_says_why(self) -> None:
        status, text = self.run_script("--rows=probe,pd-v2-6", gpus=False)
        self.assertEqual(status, 0, text)
        self.assertEqual({row["ran"] for row in self.rows().values()}, {None})
        self.assertIn("not run: needs two GPUs, this machine has 0", list(self.verdicts("pd-v2-6").values())[0])
        for row in ROWS:
            if not row.command:
                self.assertTrue(list(self.verdicts(row.name).values())[0].startswith("skipped: "), row.name)

    def test_rows_run_with_engines_that_have_no_model(self) -> None:
        if shutil.which("xz") is None:
            print("# SKIP: xz unpacks a bundle, and is not there (Debian package xz-utils)")
            self.skipTest("no xz")
        self.bundle()
        status, text = self.run_script("--rows=probe,pd-v2-6,copies", f"--vllm=--models {self.at / 'models'} --work {self.at / 'engines'}")
        self.assertEqual(status, 1, text)  # copies fails
        self.assertEqual(self.verdicts("probe"), {"GPU 0 to GPU 1": "reported"})
        found = self.rows()["pd-v2-6"]
        self.assertEqual(found["ran"]["status"], "ended", text)
        decode = found["results"]["pd-v2-hbm"]["decode"]
        for n in (10250, 32780):
            self.assertEqual([len(decode[f"pd one after the other{where} {n}"]["each"]) for where in ("", " in host memory")], [20, 5])
            self.assertEqual(len(decode[f"pd own hit {n}"]["each"]), 5)
        self.assertEqual(len(found["lines"]), 4)
        self.assertTrue(list(self.verdicts("copies").values())[0].startswith("failed: status"))
        self.assertIn("| probe: GPU 0 to GPU 1 | 390.5 GB/s | 400 GB/s: a copy | 0.976 |  | reported |", (self.at / "out" / "gpu-x2.md").read_text())
        for name in ("json", "md", "log"):
            self.assertTrue((self.at / "out" / f"gpu-x2.{name}").exists())

    def test_a_row_is_run_once_and_again_when_its_time_was_up(self) -> None:
        self.run_script("--rows=probe")
        self.ran("copies", "out of time")
        for row in ROWS:
            if row.command and row.name not in ("probe", "copies"):
                self.ran(row.name)
        status, text = self.run_script()
        self.assertNotIn("probe: bench/gpu/run.sh", text)
        self.assertIn("copies: bench/gpu/run.sh peer", text)
        status, text = self.run_script("--again", "--seconds=49")
        self.assertIn("probe: not run: no time left: it takes about 20 s", text)

    def test_hand_overs_are_met_missed_or_computed_again(self) -> None:
        def decode(after: float, cached: int, host: bool = True) -> dict:
            found = {f"pd {way} 10250": {"ms": ms, "each": [ms, ms], "cached": [cached]} for way, ms in (("at once", 30.0), ("one after the other", after))}
            found |= {f"pd {way} in host memory 10250": {"ms": 50.0, "each": [50.0], "cached": [10240]} for way in ("at once", "one after the other") if host}
            return {"decode": found | {"pd own hit 10250": {"ms": 17.0, "each": [17.0], "cached": [10240]}}}

        self.run_script("--rows=probe")
        cases = (
            (decode(20.0, 10240), ("met", "met")),
            (decode(20.1, 10240), ("met", "MISSED")),
            (decode(20.0, 8192), ("MISSED", "MISSED")),
            (decode(20.0, 10240, host=False), ("MISSED", "MISSED")),
        )
        for found, wanted in cases:
            self.ran("pd-v1-6", results={"pd-v1-hbm": found})
            status, text = self.run_script("--report")
            self.assertEqual(tuple(self.verdicts("pd-v1-6").values()), wanted, text)
            self.assertEqual(status, int("MISSED" in wanted))
            self.assertEqual([line["ratio"] for line in self.rows()["pd-v1-6"]["lines"]][0], round(30 / 17, 3))
        self.assertIn("own hit 17 ms", (self.at / "out" / "gpu-x2.md").read_text())

    def test_results_become_lines_of_the_table(self) -> None:
        self.run_script("--rows=probe")
        hit = {"ms": 15.0, "own": 10.0, "ratio": 1.5, "each": [], "from there": [1024], "missed": 0}
        self.ran("peers-v2", results={"peers-v2-hbm": {"second": {"found in another GPU, 1030": hit, "found in another GPU, 10250": {**hit, "missed": 1}}}})
        each = {"handed over": 103.0, "alone": 100.0, "in host memory": 101.0}
        pushed = {f"prefill {way} 1030": {"ms": ms, "each": [ms], "cached": [0]} for way, ms in each.items()} | {"prefill in GPU memory 1030": 1}
        beside = {"beside 3 x 10250 handed over": {"ms": 5.1, "rounds": [{"alone": 5.0, "beside": 5.1, "all steps": 5.2, "longest": 9.0, "missed": 0}]}}
        self.ran("push-v2", results={"push-v2-hbm": {"decode": pushed | beside}})
        right = {"right": 19, "of": 20, "tied": 3, "not all came": []}
        self.ran("check-pd-v2", "status 1, it says so", {"check-v2-pd-hbm": {"decode": {"handed over at once": right}}})
        self.ran("check-peers-v2", "status 1, its log ends with: no engine", {})
        goal = ',"goal":"ratio >= 0.93","goal_met":'
        rates = (("peer load", 0.95, goal + "true"), ("mapped memory of a peer, in", 0.9, goal + "false"), ("mapped memory of this GPU, in", 0.5, goal + "false"), ("peer store", 0.8, ""))
        (self.ran("copies") / "peer.json").write_text("\n".join(RATE.format(name, 400 * ratio, ratio, more) for name, ratio, more in rates))
        end = "gpu_kill: seed 0x1, {} of 300 kills in 9 s: 1 of the daemon{}: {}\n"
        (self.ran("ep-check") / "log").write_text("gpu_ep_kill: 119 of 120 ranks in processes on 2 GPUs were killed or stood still as must be; 0 KiB not back: BAD\n")
        (self.ran("kill") / "log").write_text(end.format(3, "; a control: wrong bytes are wanted", "good") + end.format(299, "", "BAD"))
        status, text = self.run_script("--report")
        self.assertEqual(status, 1, text)
        self.assertEqual(list(self.verdicts("peers-v2").values()), ["met", "MISSED"])
        self.assertEqual(list(self.verdicts("push-v2").values()), ["MISSED", "met"])
        self.assertEqual([line["ratio"] for line in self.rows()["push-v2"]["lines"]], [1.03, 1.02])
        self.assertEqual(list(self.verdicts("check-pd-v2").values()), ["MISSED"])
        self.assertEqual(list(self.verdicts("check-peers-v2").values()), ["failed: status 1, its log ends with: no engine"])
        self.assertEqual(self.verdicts("copies"), {"peer load": "met", "mapped memory of a peer, in": "MISSED"})
        self.assertEqual(list(self.verdicts("kill").values()), ["met", "MISSED"])
        self.assertEqual(list(self.verdicts("ep-check").values()), ["MISSED"])

    def test_what_another_machine_or_kvd_has_measured_is_not_in_the_table(self) -> None:
        self.run_script("--rows=probe")
        self.bundle()
        self.run_script("--report")
        self.assertEqual(list(self.verdicts("probe").values()), ["not run: not asked for"])

    def test_a_program_that_cannot_run_here_is_skipped(self) -> None:
        self.program("build/gpu_probe", "echo 'link   skipped: peer access: GPU 0 to 1 no, 1 to 0 no'; exit 77")
        status, text = self.run_script("--rows=probe")
        self.assertEqual((status, list(self.verdicts("probe").values())), (0, ["skipped: peer access: GPU 0 to 1 no, 1 to 0 no"]), text)


class Sources(unittest.TestCase):
    def test_every_source_that_run_sh_compiles_exists(self) -> None:
        """It is built on machines with GPUs only."""
        text = (ROOT / "bench" / "gpu" / "run.sh").read_text()
        patterns = re.findall(r"(?:common|kernels|bench|tests)/[\w{},/*]+\.cu?\b", text)
        self.assertGreater(len(patterns), 5)
        for pattern in patterns:
            done = subprocess.run(["bash", "-c", f"ls {pattern}"], cwd=ROOT, capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
        compiled = set(subprocess.run(["bash", "-c", "ls " + " ".join(patterns)], cwd=ROOT, capture_output=True, text=True).stdout.split())
        listed = {f"kernels/{name}" for name in re.findall(r"^\t([\w/]+\.c)$", (ROOT / "kernels" / "CMakeLists.txt").read_text(), re.M)}
        self.assertLessEqual(listed, compiled)


if __name__ == "__main__":
    unittest.main()
