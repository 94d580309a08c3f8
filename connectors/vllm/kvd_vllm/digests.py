"""Digests of whole files, remembered from start to start in a file of the user's.

A digest is remembered under what the file system says of the file: device, inode, size, mtime, ctime. It is used again as long as all five are the same, so
it is remembered only where a later change must change one of them: the file was not changed while it was read, and its times lie so far back that a change
now gets others (RACY_NS; git's index has the same rule). What is remembered is nobody else's to write: a folder or file that belongs to another user, that
others may write, or that is a link is not used. A digest that cannot be looked up is computed, one that cannot be remembered is computed again next time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from kvd_vllm import _kvd

HEADER = "kvd digests 1\n"
LINE = re.compile(r"(\d{1,20}) (\d{1,20}) (\d{1,20}) (-?\d{1,20}) (-?\d{1,20}) ([0-9a-f]{32})")
MOST = 4096  # files that are remembered; the oldest entries go first
MOST_BYTES = 1 << 20
RACY_NS = 2_000_000_000  # the coarsest time stamps there are
TRIES = 3
LOCK_TRIES, LOCK_PAUSE_S = 100, 0.02  # a process that was stopped may hold it


class Cancelled(Exception):
    """The digest is no longer wanted."""


class Changing(OSError):
    """A file was changed each time it was read."""


class Key(NamedTuple):
    """What the file system says of a file. Other contents: another key."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> Key:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def is_settled(self, now_ns: int) -> bool:
        """A change from now on gives another key."""
        return max(self.mtime_ns, self.ctime_ns) + RACY_NS < now_ns


def default_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kvd"


def _is_ours(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


class Cache:
    """The file that remembers. Several processes may use it at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def _open_folder(self) -> Iterator[int]:
        with contextlib.suppress(FileExistsError):
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700)
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if not _is_ours(os.fstat(fd)):
                raise PermissionError(f"{self.folder} belongs to another user, or others may write it")
            yield fd
        finally:
            os.close(fd)

    @staticmethod
    def _read(folder: int) -> dict[Key, str]:
        try:
            fd = os.open("digests", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except FileNotFoundError:
            return {}
        with open(fd, encoding="ascii", errors="replace", newline="\n") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or not _is_ours(found) or found.st_size > MOST_BYTES or file.readline() != HEADER:
                return {}
            rows = [LINE.fullmatch(line.rstrip("\n")) for line in file]
        return {Key(*(int(number) for number in row.groups()[:5])): row.group(6) for row in rows if row}

    def load(self) -> dict[Key, str]:
        """What is remembered; nothing where it cannot be read or trusted."""
        try:
            with self._open_folder() as folder:
                return self._read(folder)
        except (OSError, RuntimeError):  # RuntimeError: the user has no home
            return {}

    def add(self, key: Key, digest: str) -> bool:
        """Whether it is remembered from now on."""
        try:
            with self._open_folder() as folder, self._lock(folder):
                rows = self._read(folder)
                rows.pop(key, None)
                rows[key] = digest
                self._write(folder, dict(list(rows.items())[-MOST:]))
        except (OSError, RuntimeError):
            return False
        return True

    @staticmethod
    @contextlib.contextmanager
    def _lock(folder: int) -> Iterator[None]:
        """Writers take it: each keeps what the others have added."""
        fd = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            for _ in range(LOCK_TRIES):
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(LOCK_PAUSE_S)
            else:
                raise BlockingIOError("another process holds the lock")
            yield
        finally:
            os.close(fd)

    @staticmethod
    def _write(folder: int, rows: dict[Key, str]) -> None:
        text = HEADER + "".join(f"{' '.join(map(str, key))} {digest}\n" for key, digest in rows.items())
        new = f"digests.{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new, dir_fd=folder)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            with open(fd, "w", encoding="ascii", newline="\n") as file:
                file.write(text)
            os.rename(new, "digests", src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=folder)
            raise


class Digester:
    """Looks digests up, or computes them. `bytes`, `known`: what was read for that, and how many files were not."""

    def __init__(self, cache: Cache | None = None) -> None:
        self.cache = cache or Cache(default_folder())
        self.engine = _kvd.Digest()
        self.bytes = 0
        self.known = 0

    def cancel(self) -> None:
        """Of any thread: a digest that is being computed ends in Cancelled, and so do all later ones."""
        self.engine.cancel()

    def file(self, path: str, remembered: dict[Key, str]) -> tuple[Key, str]:
        """(key, digest) that belong together. OSError: it cannot be read. Blocks as long as reading takes."""
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            for _ in range(TRIES):
                key = Key.of(os.fstat(fd))
                if key in remembered:
                    self.known += 1
                    return key, remembered[key]
                settled = key.is_settled(time.time_ns())
                digest = self._compute(fd, key)
                if digest is None:
                    continue
                if settled:
                    self.cache.add(key, digest)
                return key, digest
        finally:
            os.close(fd)
        raise Changing(f"{path} changes while it is read")

    def _compute(self, fd: int, key: Key) -> str | None:
        """None: the file has changed meanwhile."""
        try:
            digest = self.engine.file(fd)
        except OSError:
            if Key.of(os.fstat(fd)) != key:
                return None
            raise
        if digest is None:
            raise Cancelled
        self.bytes += key.size
        return digest.hex() if Key.of(os.fstat(fd)) == key else None
