"""The parent of an embedded redis-server: ends it when its last user is gone.

    python -I -S embedded_keeper.py REDIS_SERVER USERS_LOCK LOCK_FD [OPTION...]

A user of the server may be killed at any time; SGLang ends its own processes that way. So the
end is not left to the users: they hold a shared lock on USERS_LOCK, which the kernel releases
however they die, and this process stops the server once it can have the lock for itself alone.

LOCK_FD is inherited and says by its lock that a server is alive. Runs in the server's directory, as
a script of the standard library only: it starts in milliseconds and stays small.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time

POLL_S = 0.2
STOP_TIMEOUT_S = 5.0


def main(server: str, users_lock: str, lock_fd: int, options: list[str]) -> None:
    """Detach, start the server, and stay until it ends or has no user."""
    if os.fork() != 0:
        os._exit(0)
    # No user's child any more: ending the user that started the server leaves it to the others.
    os.setsid()
    users = os.open(users_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    child = subprocess.Popen([server, *options], pass_fds=(lock_fd,))
    os.close(lock_fd)  # the server's copy alone says that it is alive
    while child.poll() is None and not _try_lock(users):
        time.sleep(POLL_S)
    # The lock is kept until the server has gone: who comes now waits, and starts another.
    _stop(child)


def _try_lock(users: int) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End the server; every write of it is on disk before it is answered."""
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:])
