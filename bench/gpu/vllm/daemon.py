"""kvd in a folder of its own, started, stopped and killed. No dependency but the standard library."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class Daemon:
    """kvd: folder with bin/kvd and bin/kvctl; work: its own folder, with `run` and `disk`; environment: what it has more than its
    parent; group: it ends with the process group of its parent."""

    def __init__(self, kvd: Path, work: Path, options: list[str], environment: dict[str, str] | None = None, group: bool = False) -> None:
        self.kvd, self.work, self.options, self.group = kvd, work, options, group
        self.environment = {**os.environ, **(environment or {})}
        self.socket = str(work / "run" / "default.sock")
        self.kvctl = str(kvd / "bin" / "kvctl")
        self.process: subprocess.Popen | None = None

    @property
    def pid(self) -> int:
        assert self.process
        return self.process.pid

    def start(self) -> None:
        command = [str(self.kvd / "bin" / "kvd"), f"--run_dir={self.work / 'run'}", "--http.listen=off", *self.options]
        self.process = subprocess.Popen(command, stdout=(self.work / "kvd.log").open("ab"), stderr=subprocess.STDOUT, start_new_session=not self.group, env=self.environment)
        self.wait_answers()

    def wait_answers(self) -> None:
        assert self.process
        end = time.monotonic() + 60
        while subprocess.run([self.kvctl, "--socket", self.socket, "status"], capture_output=True).returncode not in (0, 2):
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError(f"no daemon: {(self.work / 'kvd.log').read_text()[-2000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
            self.process = None

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def kept(self) -> list[int]:
        """The daemon that the keeper has started; none between two of them; during an upgrade also what checks the options."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        with suppress(OSError):  # one has just ended
            return [int(child) for child in children if b"--kept=" in Path(f"/proc/{child}/cmdline").read_bytes()]
        return []

    def replace(self, end: Callable[[int], None]) -> None:
        """end() ends the daemon alone; its keeper starts the next one, which answers."""
        before = self.kept()
        if not before:
            raise RuntimeError("the daemon has no keeper")
        end(before[0])
        until = time.monotonic() + 60
        while len(now := self.kept()) != 1 or now == before:
            if time.monotonic() > until:
                raise RuntimeError("the keeper has started no other daemon")
            time.sleep(0.05)
        self.wait_answers()

    def crash(self) -> None:
        self.replace(lambda daemon: os.kill(daemon, signal.SIGKILL))

    def upgrade(self) -> None:
        """In place (docs/upgrade.md), to the same program."""
        self.replace(lambda daemon: os.kill(self.pid, signal.SIGUSR2))
