"""Real processes for the fault benchmark, started in milliseconds: forked from one that has
everything imported. What is killed and stopped is a tier service of its own all the same.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import socket
import subprocess
from collections.abc import Callable, Coroutine, Iterator, MutableSequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import grpc

from benchmarks.tier.faults.proxies import DIALS, Meddling
from kvtier.bench.worker import die_with_parent
from kvtier.errors import StartupError, UsageError
from kvtier_tierd.cli import keep_freed_memory
from kvtier_tierd.options import TierOptions
from kvtier_tierd.server import TierServer

START_S = 20.0
ESTABLISHED = "01"  # in /proc/net/tcp
FORKS = multiprocessing.get_context("forkserver")
# All that the main module imports; that itself is run again by each child, by its name.
FORKS.set_forkserver_preload(["benchmarks.tier.faults.report", "benchmarks.tier.faults.remote"])


class Process:
    """A started one; ends with the block of `started` at the latest."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        ours, theirs = FORKS.Pipe(duplex=False)
        self.process: BaseProcess = FORKS.Process(target=target, args=(theirs, *arguments))
        self.process.start()
        theirs.close()
        try:
            if not ours.poll(START_S):
                raise StartupError(f"{target.__name__} did not start")
            self.address: str = ours.recv()
        except EOFError:
            self.process.join()
            raise StartupError(f"{target.__name__} ended at once") from None
        finally:
            ours.close()

    def send(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.process.kill()
        self.process.join()


@contextmanager
def started(target: Callable[..., None], *arguments: Any) -> Iterator[Process]:
    process = Process(target, *arguments)
    try:
        yield process
    finally:
        process.kill()


def tier_service(ready: Connection, options: TierOptions) -> None:
    """`kvtier tier` in this process."""
    keep_freed_memory()

    async def serve() -> None:
        server = TierServer(options)
        await server.start()
        ready.send(server.address)
        await asyncio.Event().wait()

    _run(serve())


def meddling_proxy(
    ready: Connection, listen: str, target: str, dials: MutableSequence[int], seed: int
) -> None:
    """A Meddling proxy in this process."""

    async def serve() -> None:
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        server = grpc.aio.server(options=[*unlimited, ("grpc.so_reuseport", 0)])
        async with grpc.aio.insecure_channel(target, options=unlimited) as channel:
            server.add_generic_rpc_handlers((Meddling(channel, dials, seed),))
            server.add_insecure_port(listen)
            await server.start()
            ready.send(listen)
            await asyncio.Event().wait()

    _run(serve())


def _run(main: Coroutine[Any, Any, None]) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # `kvtier tier` does this, too.
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def new_dials() -> MutableSequence[int]:
    """Integers that a parent and its Meddling proxy share."""
    dials: MutableSequence[int] = FORKS.RawArray("q", DIALS)
    return dials


def free_address() -> str:
    """An address where nothing listens, for one service after the other, and for none.

    Below the ports that connections of this host are given: one of those would have it when a
    service that was killed starts again.
    """
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(first_given // 2, first_given), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return f"127.0.0.1:{port}"
    raise RuntimeError("no port is free")


def connections(address: str) -> int:
    """Established connections to a port of this host, as the kernel counts them."""
    port = f":{int(address.rpartition(':')[2]):04X}"
    tables = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
    rows = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    return sum(row[1].endswith(port) and row[3] == ESTABLISHED for row in rows)


@contextmanager
def small_disk(directory: Path, num_bytes: int) -> Iterator[Path]:
    """A file system of its own, so that it can be full. Raises UsageError for who may not."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        expected = "no disk-full, or root's right to mount a small tmpfs"
        raise UsageError("--kinds", expected, done.stderr.strip())
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=False)


def fill(path: Path, left_bytes: int) -> None:
    """Take all that is free of a disk, but for `left_bytes`."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            # This writes what fits: a write to a disk that is nearly full is short before it fails.
            file.write(bytes(1 << 16))
    os.truncate(path, path.stat().st_size - left_bytes)
