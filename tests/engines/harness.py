"""Daemons on temporary directories, engines as child processes, and what is asked of both. No dependency but the standard library.

    with Bench(seed=1) as bench:
        daemon = bench.daemon()
        engine = bench.engine("gqa", connector=bench.kvd(daemon))
        answers = engine.generate([[11, 12, ...], ...], max_tokens=16)
        engine.kill()

All that a Bench has started ends with it. Problems in logs are collected: Bench.problems() must be empty at the end of a test.
"""
from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import pathlib
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, Iterable, Sequence

import models

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = pathlib.Path(os.environ.get("KVD_BUILD", ROOT / "build" / "release")).resolve()
SLOW = float(os.environ.get("KVD_TEST_SLOW", "1"))  # time limits are multiplied by this
START_S = 180.0
ANSWER_S = 120.0
# What an engine prints when something went wrong inside it, whatever the answers look like.
PROBLEM = re.compile(r"Traceback|AssertionError|Segmentation|core dumped|Fatal Python error|terminate called|EngineDeadError|\[ERROR\]| ERROR ")
HARMLESS = re.compile(r"libtcmalloc|libiomp|Failed to import|triton|resource_tracker|leaked (semaphore|shared_memory)|destroy_process_group")
ENVIRONMENT = dict(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", VLLM_HOST_IP="127.0.0.1",
                   PYTHONHASHSEED="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="INFO", TOKENIZERS_PARALLELISM="false",
                   VLLM_WORKER_MULTIPROC_METHOD="spawn")
OPTIONS: dict[str, Any] = dict(max_model_len=3072, block_size=32, max_num_seqs=8, max_num_batched_tokens=1024, num_gpu_blocks_override=512)


class Failed(Exception):
    """A promise was not kept; the text says which and how."""


class Skipped(Exception):
    """It cannot run here; the text says why."""


class Missed(Failed):
    """Right answers, but less from the store, or later, than was to be: a daemon that got no CPU for 50 ms is a miss by contract. Worth another try."""


@dataclasses.dataclass
class Answer:
    tokens: list[int]
    logprobs: list[float]
    cached: int | None  # prompt tokens that were not computed: own cache and connector together
    ttft_ms: float | None
    ms: float | None
    finish: str
    params: dict[str, Any] | None = None  # kv_transfer_params that the engine has answered


def die_with_parent() -> None:
    """In a child, before it runs its program: it must not outlive a test run that was killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def tail(log: pathlib.Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""


def wait_for(what: str, seconds: float, condition: Any, pause: float = 0.02) -> Any:
    end = time.monotonic() + seconds * SLOW
    while not (value := condition()):
        if time.monotonic() > end:
            raise Failed(f"waited {seconds * SLOW:.0f} s for {what}")
        time.sleep(pause)
    return value


class Daemon:
    """kvd on a folder of its own. kill() is the keeper's case (it restarts the daemon), stop() and start() ours."""

    def __init__(self, path: pathlib.Path, **options: str) -> None:
        self.path = path
        self.socket = path / "run" / "default.sock"
        self.log = path / "kvd.log"
        self.options = {"cpu.size": "256MiB", "cpu.slab_size": "16MiB", "index.max_blocks": "65536", "http.listen": "off", "keeper": "off",
                        "log.level": "info"} | {name.replace("__", "."): value for name, value in options.items()}
        self.environment: dict[str, str] = {}  # more than this process has
        self.process: subprocess.Popen[bytes] | None = None
        path.mkdir(parents=True, exist_ok=True)
        self.start()

    @property
    def pid(self) -> int:
        assert self.process
        return self.process.pid

    def start(self) -> None:
        arguments = [str(BUILD / "bin" / "kvd"), f"--run_dir={self.path / 'run'}"] + [f"--{k}={v}" for k, v in self.options.items()]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVD_")}  # they would configure it
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(arguments, stdout=log, stderr=log, start_new_session=True, env=environment | self.environment, preexec_fn=die_with_parent)
        wait_for("the daemon to answer", 20, self.answers)

    def answers(self) -> bool:
        if self.process and self.process.poll() is not None:
            raise Failed(f"kvd has ended: {self.log.read_text()[-2000:]}")
        return self.kvctl("status", check=False).returncode in (0, 2)

    def kvctl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([str(BUILD / "bin" / "kvctl"), *arguments, "--socket", str(self.socket)], capture_output=True, text=True)
        if check and done.returncode != 0:
            raise Failed(f"kvctl {' '.join(arguments)}: exit {done.returncode}: {done.stdout} {done.stderr}")
        return done

    def stats(self) -> dict[str, float]:
        """Every metric of the daemon: name (with labels) to value."""
        lines = (line.rsplit(None, 1) for line in self.kvctl("stats").stdout.splitlines() if line and line[0] != "#")
        return {line[0].strip(): float(line[1]) for line in lines if len(line) == 2 and re.fullmatch(r"[-+0-9.eE]+", line[1])}

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        """An orderly end: what is in memory goes to disk, if there is one."""
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(30 * SLOW)
            except subprocess.TimeoutExpired:
                self.kill()
                raise Failed("kvd did not stop in 30 s")

    def memory_files(self, name: str) -> list[str]:
        """Paths below /proc that open the daemon's shared memory of this name (slab, mirror, ledger)."""
        folder = f"/proc/{self.pid}/fd"
        return [f"{folder}/{fd}" for fd in os.listdir(folder) if f"memfd:kvd-{name}" in os.readlink(f"{folder}/{fd}")]

    def cpu_seconds(self) -> float:
        fields = pathlib.Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Engine:
    """A vLLM engine: engine.py in a process group of its own."""

    def __init__(self, bench: Bench, name: str, spec: dict[str, Any], environment: dict[str, str]) -> None:
        self.name = name
        self.log = bench.path / f"{name}.log"
        self.spec = spec
        self.expected_dead = False
        command_in, self.command_fd = os.pipe()
        self.answer_fd, answer_out = os.pipe()
        self.pending = b""
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "engine.py"), json.dumps(spec), str(command_in), str(answer_out)], stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, pass_fds=(command_in, answer_out), start_new_session=True, cwd=bench.path, preexec_fn=die_with_parent,
                env=os.environ | ENVIRONMENT | dict(PYTHONPATH=path, TMPDIR=str(bench.path), XDG_CACHE_HOME=str(bench.path / "cache")) | environment)
        os.close(command_in)
        os.close(answer_out)

    def wait_started(self) -> float:
        """Also for the digest of the weights: nothing is loaded or saved before."""
        seconds = float(self.receive(START_S)["start_s"])
        if "all ranks serve their cache" in self.log.read_text(errors="replace"):
            wait_for("the digest of the weights", 60, lambda: "kvd: weights " in self.log.read_text(errors="replace"))
        return seconds

    def send(self, **command: Any) -> None:
        text = (json.dumps(command) + "\n").encode()
        while text:
            text = text[os.write(self.command_fd, text):]

    def receive(self, limit_s: float) -> Any:
        end = time.monotonic() + limit_s * SLOW
        with selectors.DefaultSelector() as selector:
            selector.register(self.answer_fd, selectors.EVENT_READ)
            while b"\n" not in self.pending:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise Failed(f"{self.name}: no answer in {limit_s * SLOW:.0f} s\n{self.tail()}")
                piece = os.read(self.answer_fd, 1 << 20)
                if not piece:
                    raise Failed(f"{self.name}: the engine has died\n{self.tail()}")
                self.pending += piece
        line, self.pending = self.pending.split(b"\n", 1)
        answer = json.loads(line)
        if not answer["ok"]:
            raise Failed(f"{self.name}: {answer['value']}\n{self.tail()}")
        return answer["value"]

    def ask(self, limit_s: float = ANSWER_S, **command: Any) -> Any:
        self.send(**command)
        return self.receive(limit_s)

    def submit(self, requests: list[dict[str, Any]], limit_s: float = ANSWER_S) -> None:
        """Start a batch of requests (see engine.Requests) and come back at once; collect() waits for it."""
        self.send(do="generate", requests=requests, limit_s=limit_s * SLOW)

    def collect(self, limit_s: float = ANSWER_S) -> list[Answer]:
        return [Answer(**answer) for answer in self.receive(limit_s)["answers"]]

    def run(self, requests: list[dict[str, Any]], limit_s: float = ANSWER_S) -> list[Answer]:
        self.submit(requests, limit_s)
        return self.collect(limit_s)

    def generate(self, prompts: Iterable[Sequence[int]], max_tokens: int = 16, salt: str | None = None, together: bool = True,
                 params: dict[str, Any] | None = None) -> list[Answer]:
        requests = [dict(ids=list(ids), max_tokens=max_tokens, salt=salt, params=params) for ids in prompts]
        if together:
            return self.run(requests)
        return [self.run([request])[0] for request in requests]

    def reset(self) -> None:
        if not self.ask(do="reset"):
            raise Failed(f"{self.name}: the engine's own cache could not be emptied: some blocks are still in use")

    def call(self, module: str, function: str, **arguments: Any) -> Any:
        """function(engine, **arguments) of a module, inside the engine's process."""
        return self.ask(do="call", module=module, function=function, arguments=arguments)

    def blocks(self) -> tuple[int, int]:
        value = self.ask(do="blocks")
        return value["free"], value["all"]

    def alive(self) -> bool:
        return self.process.poll() is None

    def tail(self, lines: int = 30) -> str:
        return tail(self.log, lines)

    def kill(self) -> None:
        """kill -9 of all of its processes at once."""
        self.expected_dead = True
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.close()

    def stop(self) -> None:
        """Let it go; it detaches from nothing (engine.py ends without an orderly shutdown)."""
        if self.alive() and not self.expected_dead:
            try:
                self.send(do="exit")
                self.process.wait(20 * SLOW)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                pass
        self.kill()

    def close(self) -> None:
        self.process.wait()
        for fd in (self.command_fd, self.answer_fd):
            try:
                os.close(fd)
            except OSError:
                pass
        self.command_fd = self.answer_fd = -1

    def problems(self) -> list[str]:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return [f"{self.name}: {line}" for line in lines if PROBLEM.search(line) and not HARMLESS.search(line)]


class Bench:
    """What a run of tests needs: a folder, models, daemons, engines; all gone at its end."""

    def __init__(self, seed: int, keep: bool = False) -> None:
        self.seed, self.keep = seed, keep
        self.path = pathlib.Path(tempfile.mkdtemp(prefix="kvd-engines-"))
        self.daemons: list[Daemon] = []
        self.engines: list[Engine] = []
        self.folders = [self.path]
        self.count = 0

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self.engines:
            engine.kill()
        for daemon in self.daemons:
            daemon.kill()
        if self.keep:
            print(f"kept: {self.path}")
        else:
            for folder in self.folders:
                shutil.rmtree(folder, ignore_errors=True)

    def folder(self, name: str) -> pathlib.Path:
        self.count += 1
        path = self.path / f"{name}{self.count}"
        path.mkdir()
        return path

    def model(self, shape: str, seed: int = 0) -> str:
        return models.make(shape, str(self.path / "models"), seed)

    def daemon(self, **options: str) -> Daemon:
        daemon = Daemon(self.folder("d"), **options)
        self.daemons.append(daemon)
        return daemon

    def start_engine(self, model: str, connector: dict[str, Any] | None = None, mp: bool = False, environment: dict[str, str] | None = None,
                     weights: int = 0, changed: bool = False, **options: Any) -> Engine:
        """Like engine(), but comes back before it has started: wait_started() is the caller's. `changed`: see models.changed()."""
        self.count += 1
        path = self.model(model, weights)
        spec = dict(model=models.changed(path, str(self.path / "models")) if changed else path, connector=connector, options=OPTIONS | options)
        more = dict(VLLM_ENABLE_V1_MULTIPROCESSING="1" if mp else "0") | (environment or {})
        engine = Engine(self, f"engine{self.count}-{model}{'-mp' if mp else ''}", spec, more)
        self.engines.append(engine)
        return engine

    def engine(self, model: str, connector: dict[str, Any] | None = None, **options: Any) -> Engine:
        engine = self.start_engine(model, connector, **options)
        engine.wait_started()
        return engine

    def kvd(self, daemon: Daemon | None, **extra: Any) -> dict[str, Any]:
        """The connector under test. Without a daemon: a socket that nobody listens on. What is too slow to pay is loaded nevertheless."""
        socket = str(daemon.socket if daemon else self.path / "nobody.sock")
        return connector("KvdConnector", "kvd_vllm.connector", dict(socket=socket, cost_model=False) | extra)

    def problems(self) -> list[str]:
        return [problem for engine in self.engines for problem in engine.problems()]


def connector(name: str, module: str | None, extra: dict[str, Any]) -> dict[str, Any]:
    out = dict(kv_connector=name, kv_role="kv_both", kv_load_failure_policy="recompute", kv_connector_extra_config=extra)
    return out | (dict(kv_connector_module_path=module) if module else {})


def naive(path: pathlib.Path, **extra: Any) -> dict[str, Any]:
    """One file per block: the baseline, and the proof that the tests can be passed."""
    return connector("NaiveConnector", "naive", dict(path=str(path)) | extra)


def example(path: pathlib.Path) -> dict[str, Any]:
    """vLLM's own example: one file per layer of a whole prompt."""
    return connector("ExampleConnector", None, dict(shared_storage_path=str(path)))
