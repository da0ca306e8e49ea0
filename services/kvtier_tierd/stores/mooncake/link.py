"""The way to Mooncake's C++ client: the memory it uses, its threads.

    Extent          a stretch of staging memory that a thread of the client may be using
    MooncakeLink    the client, called with deadlines; knows whether the master is there

The C++ client runs in this process, and was found to be like this (0.3.13). It writes to stderr. A
call of it closed or not set up is a segmentation fault. Its setup and close keep the GIL: setup for
seconds where something else answers than a master, close for 1 to 2 s, or about 11 s while the
master is away. Transfers and lookups do not. So only MooncakeLink touches it, and memory goes back
when the thread that uses it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import ipaddress
import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvtier.errors import TierExhaustedError, TierUnavailableError, UsageError
from kvtier_tierd.stores.arena import Arena
from kvtier_tierd.stores.mooncake.options import MooncakeOptions

INSTALL = (
    "an installed Mooncake: pip install mooncake-transfer-engine-non-cuda, "
    "and apt-get install libcurl4 libibverbs1 libnuma1"
)

THREADS = 8
PROBE_S = 0.25
CONNECT_S = 2.0

# The codes are those of mooncake-store/include/types.h.
NO_ROOM, NOT_READY, NOT_FOUND, GONE = -200, -703, -704, -712
TRANSFER_FAILED, RPC_FAILED, RPC_TIMED_OUT = -800, -900, -901

logger = logging.getLogger(__name__)


class Extent:
    """Staging memory that one call at a time may be using. Free it once, whenever you like."""

    def __init__(self, arena: Arena, num_bytes: int) -> None:
        """Raises TierExhaustedError when there is no such stretch."""
        offset = arena.allocate(num_bytes)
        if offset is None:
            raise TierExhaustedError(
                f"no {num_bytes} bytes of staging memory in one piece (--mooncake-buffer is "
                f"{arena.capacity_bytes}): they are being read or written"
            )
        self.arena, self.offset, self.num_bytes = arena, offset, num_bytes
        self.user: Future[Any] | None = None

    def free(self) -> None:
        """Free the memory at once, or when the thread that still moves bytes here has ended."""
        if self.user is None or self.user.done():
            self.arena.free(self.offset)
            return
        loop = asyncio.get_running_loop()

        def ended(_: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, the arena with it
                loop.call_soon_threadsafe(self.arena.free, self.offset)

        self.user.add_done_callback(ended)


class MooncakeLink:
    """The C++ client: its threads, its deadlines, and whether its master is there.

    The client reconnects and mounts its segment again by itself, but takes seconds to fail each
    call until then; so after one failure calls fail here, and a probe asks until one succeeds.
    Belongs to one event loop at a time.
    """

    def __init__(self, options: MooncakeOptions) -> None:
        """Raises UsageError where the package is not installed."""
        if importlib.util.find_spec("mooncake") is None:
            raise UsageError("--store", INSTALL, "mooncake")
        self.options = options
        self.placement: Any = None
        self._client: Any = None
        self._threads = ThreadPoolExecutor(THREADS, "mooncake-store")
        self._calls: set[Future[Any]] = set()
        self._away: str | None = "not started"
        self._probe: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises TierUnavailableError naming the master, TierExhaustedError, UsageError."""
        check_memory(self.options)
        # The client itself would try for many seconds, in which this process stands still.
        address = await self._connect()
        hostname = self.options.local_hostname or address
        answer = await asyncio.wrap_future(self._submit(self._setup, hostname))
        if isinstance(answer, Exception):
            raise answer
        self._client, self.placement = answer
        self._away = None

    async def _connect(self) -> str:
        """The address from which this machine reaches the master."""
        host, port = self.options.master_address
        try:
            address = await reached_from(host, port, CONNECT_S)
        except (OSError, TimeoutError) as error:
            raise self._unavailable(str(error) or "no answer") from error
        return f"[{address}]" if ipaddress.ip_address(address).version == 6 else address

    def _setup(self, hostname: str) -> tuple[Any, Any]:
        """A working client and where it puts things: at home first."""
        options = self.options
        configure_environment(options.timeout_s)
        try:
            mooncake: Any = importlib.import_module("mooncake.store")
        except ImportError as error:
            raise UsageError("--store", INSTALL, f"mooncake ({error})") from error
        client = mooncake.MooncakeDistributedStore()
        # No local buffer: bytes go between our staging memory and the segments.
        arguments = (options.segment_bytes, 0, "tcp", "", options.master)
        code = client.setup(hostname, options.metadata, *arguments)
        if code != 0:
            client.close()
            raise self._unavailable(
                f"setup failed ({code}) with --mooncake-metadata {options.metadata}, "
                f"--mooncake-local-hostname {hostname}, --mooncake-segment {options.segment_bytes}"
            )
        placement = mooncake.ReplicateConfig()
        placement.replica_num = options.replicas
        if options.segment_bytes and options.replicas == 1:
            placement.preferred_segment = client.get_hostname()
        return client, placement

    async def close(self) -> None:
        """Unmount the segment: what it holds is gone. A client that hangs is left to the end of
        the process, because closing it under a thread that uses it would end that at once."""
        client, self._client, self._away = self._client, None, "closed"
        if self._probe is not None:
            self._probe.cancel()
        for call in list(self._calls):
            call.cancel()
        if self._calls:
            running = [asyncio.wrap_future(call) for call in list(self._calls)]
            await asyncio.wait(running, timeout=2 * self.options.timeout_s)
        if client is not None and not self._calls:
            await asyncio.wrap_future(self._submit(client.close))
        if self._calls:
            logger.warning("mooncake's client hangs; its threads are left behind")
        self._threads.shutdown(wait=False)

    @property
    def closed(self) -> bool:
        """Return True once no thread uses our memory any more."""
        return not self._calls

    def check(self) -> None:
        """Raises TierUnavailableError while calls would."""
        if self._away is not None:
            raise self._unavailable(self._away)

    async def call(self, method: str, *arguments: Any, extent: Extent | None = None) -> Any:
        """Call a method of the client and return its answer: a code, or codes; negative ones are
        errors.

        extent: memory that the method uses, possibly after this has raised.
        Raises TierUnavailableError when the master does not answer, or the client not in time.
        """
        self.check()
        call = self._submit(getattr(self._client, method), *arguments)
        if extent is not None:
            extent.user = call
        await asyncio.wait({asyncio.wrap_future(call)}, timeout=self.options.timeout_s)
        if not call.done() and not call.cancel():
            raise self._suspect(f"{method} took more than {self.options.timeout_s:g} s")
        if call.cancelled():
            raise self._suspect("all threads wait for it")
        answer = call.result()
        if isinstance(answer, Exception):
            raise self._suspect(f"{method}: {answer}")
        codes = answer[:1] if isinstance(answer, list) else [answer]
        if RPC_FAILED in codes or RPC_TIMED_OUT in codes:
            raise self._suspect("the master does not answer")
        return answer

    def _submit(self, function: Any, *arguments: Any) -> Future[Any]:
        call = self._threads.submit(_answer, function, arguments)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    def _suspect(self, why: str) -> TierUnavailableError:
        """Fail all calls until the master has answered."""
        if self._away is None:
            logger.warning("mooncake master %s: %s; reads miss", self.options.master, why)
            self._away = why
            self._probe = asyncio.create_task(self._ask_until_it_answers())
        return self._unavailable(why)

    async def _ask_until_it_answers(self) -> None:
        while True:
            try:
                await self._connect()
                answer = await asyncio.wrap_future(self._submit(self._client.is_exist, "kvtier"))
                if not isinstance(answer, Exception) and answer >= 0:
                    break
            except TierUnavailableError:
                pass
            except Exception:
                # Without this the loop would end, and the master never be asked again.
                logger.exception("mooncake's client answers strangely")
            await asyncio.sleep(PROBE_S)
        self._away = None
        logger.warning("mooncake master %s answers again", self.options.master)

    def _unavailable(self, why: str) -> TierUnavailableError:
        return TierUnavailableError(f"--mooncake-master {self.options.master}: {why}")


async def reached_from(host: str, port: int, timeout_s: float) -> str:
    """Return the address of this machine from which it reaches a process that listens there. Raises
    OSError or TimeoutError where none does."""
    async with asyncio.timeout(timeout_s):
        _, writer = await asyncio.open_connection(host.strip("[]"), port)
    address = str(writer.get_extra_info("sockname")[0])
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return address


def check_memory(options: MooncakeOptions) -> None:
    """Raises TierExhaustedError for a segment that would have the process killed later: its pages
    are taken only as they are written."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return
    kib = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
    wanted = options.segment_bytes + options.buffer_bytes
    if kib is not None and wanted > kib * 1024:
        raise TierExhaustedError(
            f"--mooncake-segment {options.segment_bytes} and --mooncake-buffer "
            f"{options.buffer_bytes}: {kib * 1024} bytes of memory are available"
        )


def configure_environment(timeout_s: float) -> None:
    """The C++ client takes these from nowhere else; what the user has set stays."""
    milliseconds, seconds = str(int(timeout_s * 1000)), str(max(1, int(timeout_s)))
    for name, value in {
        "MC_RPC_TIMEOUT_MS": milliseconds,
        "MC_RPC_CONNECT_TIMEOUT_MS": milliseconds,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
        "MC_STORE_CLIENT_SETUP_RETRIES": "2",
        "MC_LOG_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(name, value)


def _answer(function: Any, arguments: tuple[Any, ...]) -> Any:
    """Call the function, in a thread, and return its answer; an error that it raises is an answer
    too, so that no caller has to wait for it."""
    try:
        return function(*arguments)
    except Exception as error:
        return error
