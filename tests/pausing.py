"""Stopping a process for a while: the tests' way to have a server that hangs."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from waiting import wait_for


def pause(pid: int) -> None:
    """Sends SIGSTOP, and returns when every thread of the process has stopped.

    Without the wait a thread on another CPU may still answer a call made right after the signal.
    """
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: set(_thread_states(pid)) == {"T"}, f"process {pid} did not stop")


def resume(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


def _thread_states(pid: int) -> list[str]:
    """One letter for each thread, as in proc_pid_stat(5): "T" is stopped."""
    stats = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        # A thread may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            stats.append((task / "stat").read_text())
    # The second field is the program's name in parentheses, and may have any of them inside.
    return [stat.rpartition(")")[2].split()[0] for stat in stats]
