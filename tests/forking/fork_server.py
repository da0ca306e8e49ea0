"""A process that has SGLang imported and forks a process for each command: see forked_commands.py.

`python fork_server.py ADDRESS FILE` listens on a Unix socket, and then closes the file descriptor
FILE. A connection carries one job: first a line
of JSON (arguments, environment, working directory) with the client's open files, then one byte per
signal to deliver. The server answers with the exit code. When the client closes the connection,
the forked process and its group are killed. Instead of a job a connection may carry RETIRE: then
the server takes no more jobs, and ends when its last fork has.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import threading
from typing import Any

from forked_commands import RETIRE

LOOK_S = 5.0
MOST_FILES = 64


def serve(address: str, listens: int) -> None:
    """Import what engines need, then fork a process per job until the tests have ended."""
    preload()
    # Without this a fork's first collection would copy all that was imported.
    gc.collect()
    gc.freeze()
    tests = int(os.environ["TESTS_PROCESS"])
    listener = socket.socket(socket.AF_UNIX)
    # The address may be that of one that was killed; whoever starts a server holds the lock.
    unlink(address)
    listener.bind(address)
    listener.listen(64)
    listener.setblocking(False)
    os.close(listens)
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno())
    asked_by: dict[int, socket.socket] = {}
    reachable = [listener]
    while runs(tests) and (reachable or asked_by):
        readable, _, _ = select.select([*reachable, woken], [], [], LOOK_S)
        if woken in readable:
            woken.recv(4096)
        if listener in readable:
            connection, _ = listener.accept()
            text, files = received(connection)
            if text == RETIRE:
                reachable = []
                unlink(address)
                listener.close()
                connection.close()
            elif text:
                asked_by[fork(text, files, connection)] = connection
        report_ended(asked_by)
    if reachable:
        unlink(address)


def unlink(address: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(address)


def preload() -> None:
    import setproctitle
    import sglang
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler

    # SGLang finds its processes by their titles. setproctitle locates the title in memory at its
    # first call, which fails after `become` has replaced the environment.
    setproctitle.getproctitle()

    # Every engine does this at its start: hooks are of the code, not of a server, and each process
    # builds what they call for itself.
    from sglang.srt.plugins import load_plugins

    load_plugins()
    # It imports every model that SGLang knows.
    import sglang.srt.models.registry  # noqa: F401


def runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def received(connection: socket.socket) -> tuple[bytes, list[int]]:
    """The line that a client sends, and its files; an empty line where it sends none in time."""
    connection.settimeout(10)
    try:
        text, files, _, _ = socket.recv_fds(connection, 1 << 20, MOST_FILES)
        while text and not text.endswith(b"\n"):
            text += connection.recv(1 << 20)
    except OSError:
        return b"", []
    connection.settimeout(None)
    return text, files


def fork(text: bytes, files: list[int], connection: socket.socket) -> int:
    """The process that does a job."""
    child = os.fork()
    if child == 0:
        become(json.loads(text), files, connection)
    for file in files:
        os.close(file)
    return child


def report_ended(asked_by: dict[int, socket.socket]) -> None:
    """Send the exit codes of processes that have ended to their clients; kill what is left of their
    process groups."""
    while asked_by:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if (connection := asked_by.pop(child, None)) is not None:
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def become(job: dict[str, Any], files: list[int], connection: socket.socket) -> None:
    """Do the job, in the forked process. Does not return."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        own = socket.socket(fileno=take_files(job["files"], files, connection))
        threading.Thread(target=obey, args=(own,), name="obey", daemon=True).start()
        os.environ.clear()
        os.environ.update(job["environment"])
        os.chdir(job["folder"])
        random.seed()
        run(job["arguments"])
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        save_coverage()
        os._exit(code)


def take_files(numbers: list[int], files: list[int], connection: socket.socket) -> int:
    """Give the files the numbers that they had. Returns where the connection is now, out of the
    way."""
    above = 1 + max([*numbers, *files, connection.fileno()])
    told = fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, above)
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for file in files]
    for file in (*files, connection.fileno()):
        os.close(file)
    for number, file in zip(numbers, moved, strict=True):
        os.dup2(file, number)
        os.close(file)
    return told


def obey(connection: socket.socket) -> None:
    """Deliver the signals that the client sends; kill the group when the client is gone."""
    while told := connection.recv(1):
        os.kill(os.getpid(), told[0])
    os.killpg(os.getpid(), signal.SIGKILL)


def run(arguments: list[str]) -> None:
    """Run what Python would with these arguments: `-m module …`, `-c code …` or `script …`."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")


def save_coverage() -> None:
    """Save coverage where it is measured, before a process ends that saves nothing at its end."""
    if "coverage" in sys.modules and (measured := sys.modules["coverage"].Coverage.current()):
        measured.save()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
