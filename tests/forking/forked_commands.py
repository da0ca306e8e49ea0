"""Commands that import SGLang are forked from a process that has it imported.

    test ── python -m kvtier serve … ── job ──> fork server (imported SGLang once)
                  │  <── exit code ──────────────────  └─ fork: runs the command
                  └─ passes signals on                        └─ fork: scheduler, detokenizer

Importing SGLang takes ten seconds of CPU, which is most of what an engine costs a test. A Python
that is started for one of COMMANDS therefore does not run it. It sends its arguments, environment,
working directory and open files to a fork server, waits for the process that the server forks, and
ends with that process's exit code. If it is killed, the forked process and its group are killed.

There is one fork server for each environment that decides what is imported (Triton, PYTHONPATH,
SGLang's own variables), started when it is first needed, and ended when the tests have ended. As
each holds 800 MB, there are MOST of them at most: the one that was used longest ago is retired, and
ends when its last fork has. TESTS_FORK_SERVERS says where they listen; without it, or with
TESTS_SPAWN, commands start as usual.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMANDS = re.compile(
    r"-m kvtier (check|serve)|-m kvtier\.bench\.worker|-m benchmarks\.[a-z_.]+(engine|worker)|"
    r"-c from multiprocessing\.spawn import|/\S*/tests/engine/(ranks/|scheduling/)?[a-z_]+\.py"
)
FOLDER = "TESTS_FORK_SERVERS"
SERVER = Path(__file__).with_name("fork_server.py")
# Fork servers that take jobs.
MOST = 4
RETIRE = b"retire\n"
# They decide nothing about what is imported; but for one of ours, which chooses SGLang's platform.
# SGLang reads the two variables of its own when it needs them, not when it is imported.
HARMLESS = (
    "KVTIER_",
    "PYTEST_",
    "SGLANG_CPU_OMP_THREADS_BIND",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY",
)
PLATFORM = "KVTIER_FORCE_CPU"
HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def take_over() -> None:
    """Have a fork run this process, if it was started for one of COMMANDS, and do not return."""
    # A spawned process is told by a flag what PYTHONDONTWRITEBYTECODE tells the fork server.
    arguments = [one for one in sys.orig_argv[1:] if one != "-B"]
    if not COMMANDS.match(" ".join(arguments)):
        return
    with connected(Path(os.environ[FOLDER]), dict(os.environ)) as connection:
        files = [number for number in open_files() if number != connection.fileno()]
        job = {
            "arguments": arguments,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "files": files,
        }
        send_job(connection, job)
        for number in HANDED_ON:
            signal.signal(number, lambda number, _: connection.send(bytes([number])))
        end_like(int(connection.makefile().readline()))


def imports_by(environment: dict[str, str]) -> dict[str, str]:
    """Variables that may decide what is imported, or how."""
    return {k: v for k, v in environment.items() if k == PLATFORM or not k.startswith(HARMLESS)}


def connected(folder: Path, environment: dict[str, str]) -> socket.socket:
    """A connection to the fork server for such an environment; started, if there is none."""
    decides = imports_by(environment)
    name = hashlib.sha256(json.dumps(sorted(decides.items())).encode()).hexdigest()[:16]
    address = str(folder / name)
    connection = socket.socket(socket.AF_UNIX)
    with open(f"{address}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if connection.connect_ex(address) == 0:
            os.utime(address)
            return connection
        ready, listens = os.pipe()
        with open(f"{address}.log", "w") as log:
            subprocess.Popen(
                [sys.executable, str(SERVER), address, str(listens)],
                env=decides,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(listens,),
            )
        os.close(listens)
        # Its end of the pipe is closed when it listens, or has ended.
        os.read(ready, 1)
        os.close(ready)
        assert connection.connect_ex(address) == 0, Path(f"{address}.log").read_text()[-4000:]
    retire_others(folder, keep=name)
    return connection


def retire_others(folder: Path, keep: str) -> None:
    """Retire those fork servers that were used longest ago, so that MOST are left."""
    used: list[tuple[float, Path]] = []
    for file in folder.iterdir():
        # Another process may retire one meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if file.is_socket() and file.name != keep:
                used.append((file.stat().st_mtime, file))
    for _, address in sorted(used, reverse=True)[MOST - 1 :]:
        retire(address)


def retire(address: Path) -> None:
    """Tell a fork server that no more jobs come, unless one is on its way there."""
    with open(f"{address}.lock", "w") as lock, socket.socket(socket.AF_UNIX) as connection:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if connection.connect_ex(str(address)) == 0:
            connection.sendall(RETIRE)
            # It closes the connection once nobody can reach it any more.
            connection.recv(1)


def open_files() -> list[int]:
    """File descriptors that this process was given."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:
            continue
    return found


def send_job(connection: socket.socket, job: dict[str, Any]) -> None:
    """One line of JSON, and the files that it names."""
    text = json.dumps(job).encode() + b"\n"
    sent = socket.send_fds(connection, [text], job["files"])
    connection.sendall(text[sent:])


def end_like(code: int) -> None:
    """End this process as the one that it waited for. code: negative for a signal."""
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
