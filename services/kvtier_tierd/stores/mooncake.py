"""The store `mooncake`: blobs in Mooncake Store, the memory of several tier services as one.

    tier service A ─┐  register, place, lease, evict   ┌─────────────────┐
    tier service B ─┼──────────────────────────────────┤ mooncake_master │
    tier service C ─┘                                  └─────────────────┘
          └── bytes, straight between the segments that the services contribute

    object  0           num_bytes
            [ payload ][ layout ][ checksum 16 | num_bytes 8 | layout's bytes 4 | magic 8 ]

A blob is one object, so it is there whole or not at all; the parts that describe it follow the
payload, which so begins at a page of the staging memory.

Promised:

    sharing   What is committed on one service is found on all. What `open` returns is what was
              committed, or does not verify.
    a peer    A blob lives in one segment (or `replicas`), the writer's own where that has room.
    dies      When the process that has it dies it is a miss, though `exists` says otherwise until
              the master drops the segment (its client_ttl, 10 s). Other blobs are not concerned.
    time      A call ends within about `timeout_s`; a commit within TRIES times that, where it has
              to be placed anew. While the master is away, at once: reads miss, writes raise
              TierUnavailableError. It comes back by itself.

Not promised:

    room      Capacity and quotas bind what THIS service has put, least recently used first, as far
              as it knows; others count what they put in the same namespace. The master evicts
              besides, by leases, when segments are full, so stats are an upper bound until a
              lookup corrects them. `exists` gives a lease, which the master counts as a use.
    pins      A handle is a copy: it outlives eviction and delete, and keeps nothing in the store.
              Delete, replace and evict do not wait for leases: who reads that very blob from
              another service may get bytes that do not verify.
    races     Two services that put one name at a time both succeed, and the first one's bytes stay.
              If that one is killed meanwhile there are none, and commits of that name have no
              effect while the master waits for it (its put_start_discard_timeout_sec, 30 s).
    restarts  Nothing survives the master: a new one knows the services' segments, but no blobs.

The C++ client runs in this process, and was found to be like this (0.3.13): it writes to stderr;
calling it closed or not set up is a segmentation fault; its setup and close keep the GIL,
setup for seconds where something else answers than a master, close for 1 to 2 s, or about 11 s
while the master is away; transfers and lookups do not. So only MooncakeLink touches it, and memory
goes back when the thread that uses it has ended. Peers are trusted: whoever reaches the master or
a segment's port reads and writes everything, without TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import ipaddress
import logging
import os
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.errors import TierExhaustedError, TierUnavailableError, UsageError
from kvtier_tierd.stores.arena import Arena
from kvtier_tierd.stores.base import BlobInfo, BlobName, BlobStore, Draft, Handle, StoreStats
from kvtier_tierd.stores.lru import LruAccount

GIB = 1 << 30
MIN_SEGMENT_BYTES = 16 << 20  # the client's
P2P = "P2PHANDSHAKE"
INSTALL = (
    "an installed Mooncake: pip install mooncake-transfer-engine-non-cuda, "
    "and apt-get install libibverbs1 librdmacm1 libnuma1"
)

THREADS = 8
TRIES = 4  # of a put that found no room or a dead segment; the master places each anew
RETRY_S = 0.05  # for the master to evict
PROBE_S = 0.25
CONNECT_S = 2.0

# Of mooncake-store/include/types.h.
NO_ROOM, NOT_READY, NOT_FOUND, GONE = -200, -703, -704, -712
TRANSFER_FAILED, RPC_FAILED, RPC_TIMED_OUT = -800, -900, -901

FOOTER = struct.Struct("<16sQI8s")
MAGIC = b"kvtier/1"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MooncakeOptions:
    """master:         host:port of the mooncake_master.
    metadata:       P2PHANDSHAKE, or the URL of its HTTP metadata server.
    local_hostname: under which the other services reach this one; None: the address from which
                    it reaches the master.
    segment_bytes:  of memory that this service contributes; 0: it only uses the others'.
    buffer_bytes:   of staging memory: everything being written or read at a time, and therefore
                    the largest blob.
    capacity_bytes: of what this service puts; None: as much as it contributes.
    replicas:       segments that hold each blob.
    prefix:         of the object names; services with the same one share blobs.
    timeout_s:      of one call. The first store of a process sets it for the C++ client.
    """

    master: str = "127.0.0.1:50051"
    metadata: str = P2P
    local_hostname: str | None = None
    segment_bytes: int = 4 * GIB
    buffer_bytes: int = 2 * GIB
    capacity_bytes: int | None = None
    replicas: int = 1
    prefix: str = "kvtier"
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        host, port = self.master_address
        if not host or not 1 <= port < 1 << 16:
            raise UsageError("--mooncake-master", "host:port", self.master)
        if self.metadata != P2P and not self.metadata.startswith(("http://", "https://")):
            raise UsageError("--mooncake-metadata", f"{P2P} or an http URL", self.metadata)
        if self.segment_bytes and self.segment_bytes < MIN_SEGMENT_BYTES:
            expected = f"0, or at least {MIN_SEGMENT_BYTES}"
            raise UsageError("--mooncake-segment", expected, self.segment_bytes)
        if self.put_bytes < 1:
            raise UsageError("--mooncake-capacity", "at least 1 (no segment, no default)", None)
        for name in ("buffer_bytes", "replicas"):
            if getattr(self, name) < 1:
                flag = f"--mooncake-{name.removesuffix('_bytes')}"
                raise UsageError(flag, "at least 1", getattr(self, name))
        if not 0.1 <= self.timeout_s <= 60:
            raise UsageError("timeout_s", "0.1 … 60 seconds", self.timeout_s)

    @property
    def master_address(self) -> tuple[str, int]:
        """Port 0 where there is none."""
        host, _, port = self.master.rpartition(":")
        return host, int(port) if port.isascii() and port.isdigit() else 0

    @property
    def put_bytes(self) -> int:
        return self.segment_bytes if self.capacity_bytes is None else self.capacity_bytes


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
        """At once, or when the thread that still moves bytes here has ended."""
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
            connecting = asyncio.open_connection(host.strip("[]"), port)
            _, writer = await asyncio.wait_for(connecting, CONNECT_S)
        except (OSError, TimeoutError) as error:
            raise self._unavailable(str(error) or "no answer") from error
        address = str(writer.get_extra_info("sockname")[0])
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
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
            running = [asyncio.wrap_future(call) for call in self._calls]
            await asyncio.wait(running, timeout=2 * self.options.timeout_s)
        if client is not None and not self._calls:
            await asyncio.wrap_future(self._submit(client.close))
        if self._calls:
            logger.warning("mooncake's client hangs; its threads are left behind")
        self._threads.shutdown(wait=False)

    @property
    def closed(self) -> bool:
        """Whether no thread uses anybody's memory any more."""
        return not self._calls

    def check(self) -> None:
        """Raises TierUnavailableError while calls would."""
        if self._away is not None:
            raise self._unavailable(self._away)

    async def call(self, method: str, *arguments: Any, extent: Extent | None = None) -> Any:
        """What the client's method answers: a code, or codes; negative ones are errors.

        extent: memory that the method uses, possibly after this has raised.
        Raises TierUnavailableError when the master does not answer, or nobody in time.
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
        if (answer[0] if isinstance(answer, list) else answer) in (RPC_FAILED, RPC_TIMED_OUT):
            raise self._suspect("the master does not answer")
        return answer

    def _submit(self, function: Any, *arguments: Any) -> Future[Any]:
        call = self._threads.submit(_answer, function, arguments)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    def _suspect(self, why: str) -> TierUnavailableError:
        """Ask nobody any more until the master has answered."""
        if self._away is None:
            logger.warning("mooncake master %s: %s; reads miss", self.options.master, why)
            self._away = why
            self._probe = asyncio.create_task(self._ask_until_it_answers())
        return self._unavailable(why)

    async def _ask_until_it_answers(self) -> None:
        while True:
            with contextlib.suppress(TierUnavailableError):
                await self._connect()
                answer = await asyncio.wrap_future(self._submit(self._client.is_exist, "kvtier"))
                if not isinstance(answer, Exception) and answer >= 0:
                    break
            await asyncio.sleep(PROBE_S)
        self._away = None
        logger.warning("mooncake master %s answers again", self.options.master)

    def _unavailable(self, why: str) -> TierUnavailableError:
        return TierUnavailableError(f"--mooncake-master {self.options.master}: {why}")


class MooncakeDraft(Draft):
    def __init__(self, name: BlobName, info: BlobInfo, extent: Extent) -> None:
        self.name, self.info, self.extent, self.offset = name, info, extent, extent.offset
        self.buffer = extent.arena.view(extent.offset, info.num_bytes)


class MooncakeHandle(Handle):
    def __init__(self, info: BlobInfo, extent: Extent) -> None:
        self.info, self.offset = info, extent.offset
        self.pieces = (extent.arena.view(extent.offset, info.num_bytes).toreadonly(),)
        self._extent: Extent | None = extent

    def close(self) -> None:
        if self._extent is not None:
            self._extent.free()
            self._extent = None


class MooncakeStore(BlobStore):
    """See the module docstring.

    quotas:    bytes by namespace, of what this service puts.
    directory: for the file of the staging memory that clients on the same host map, or None.
    link:      a started one of several stores in this process, which `close` leaves alone.
    """

    kind = "mooncake"

    def __init__(
        self,
        options: MooncakeOptions,
        quotas: Mapping[str, int] | None = None,
        directory: Path | None = None,
        link: MooncakeLink | None = None,
    ) -> None:
        self.options = options
        self.account = LruAccount(options.put_bytes, quotas)
        self.quarantined = 0
        self._link = MooncakeLink(options) if link is None else link
        self._owns_link = link is None
        self._condemned: set[BlobName] = set()
        self.arena = Arena(options.buffer_bytes, directory)
        self._base = int(np.frombuffer(self.arena.memory, np.uint8).ctypes.data)

    async def start(self) -> None:
        if self._owns_link:
            await self._link.start()
        code = await self._link.call("register_buffer", self._base, self.arena.size)
        if code != 0:
            raise TierUnavailableError(f"--mooncake-buffer {self.arena.size}: register: {code}")

    async def close(self) -> None:
        with contextlib.suppress(TierUnavailableError):
            await self._link.call("unregister_buffer", self._base)
        if self._owns_link:
            await self._link.close()
        if self._link.closed:
            self.arena.close()

    async def exists(self, names: Sequence[BlobName]) -> list[bool]:
        try:
            codes = await self._link.call("batch_is_exist", [self._key(name) for name in names])
        except TierUnavailableError:
            return [False] * len(names)
        for name, code in zip(names, codes, strict=True):
            if code == 0:
                self._forget(name)
        pairs = zip(names, codes, strict=True)
        return [code == 1 and name not in self._condemned for name, code in pairs]

    async def reserve(self, name: BlobName, info: BlobInfo) -> Draft:
        check_object(name, info)
        self._link.check()
        size = object_bytes(info)
        victims = self.account.plan(name.namespace, size)
        draft = MooncakeDraft(name, info, Extent(self.arena, size))
        for victim in victims:
            self._forget(victim, evicted=True)
        self.account.reserve(name.namespace, size)
        try:
            # If the master is away now, it evicts them some day, or dies and forgets them.
            with contextlib.suppress(TierUnavailableError):
                if victims:
                    keys = [self._key(victim) for victim in victims]
                    await self._link.call("batch_remove", keys, True)
        except BaseException:
            await self.abort(draft)
            raise
        return draft

    async def commit(self, draft: Draft) -> None:
        """As in the interface. After a failure the blob may be there, or the one that was."""
        assert isinstance(draft, MooncakeDraft)
        name, size = draft.name, draft.extent.num_bytes
        try:
            end = draft.extent.offset + size
            begin = draft.extent.offset + draft.info.num_bytes
            self.arena.memory[begin:end] = trailer(draft.info)
            await self._put(self._key(name), draft.extent)
        finally:
            self.account.release(name.namespace, size)
            draft.extent.free()
        self._forget(name)
        self._condemned.discard(name)
        self.account.add(name, size)

    async def _put(self, key: str, extent: Extent) -> None:
        """Put, not upsert: that would cut off another service that is putting the same blob, and
        the master keeps such memory from everybody for ten minutes. Whoever puts first does."""
        if await self._link.call("is_exist", key) == 1:
            await self._link.call("remove", key, True)
        arguments = (key, self._base + extent.offset, extent.num_bytes, self._link.placement)
        code = NO_ROOM
        for number in range(TRIES):
            if number:
                await asyncio.sleep(RETRY_S)
            code = await self._link.call("put_from", *arguments, extent=extent)
            if code not in (NO_ROOM, TRANSFER_FAILED, NOT_FOUND):
                break
        if code == NO_ROOM:
            raise TierExhaustedError(f"mooncake has no room for {extent.num_bytes} bytes")
        if code != 0:
            raise TierUnavailableError(f"--mooncake-master {self.options.master}: put: {code}")

    async def abort(self, draft: Draft) -> None:
        assert isinstance(draft, MooncakeDraft)
        self.account.release(draft.name.namespace, draft.extent.num_bytes)
        draft.extent.free()

    async def open(self, name: BlobName) -> Handle | None:
        """As in the interface; raises TierExhaustedError when no staging memory is left."""
        if name in self._condemned:
            return None
        key = self._key(name)
        try:
            size = await self._link.call("get_size", key)
            if size <= 0:
                self._missed(name, size)
                return None
            extent = Extent(self.arena, size)
            try:
                address = self._base + extent.offset
                got = await self._link.call("get_into", key, address, size, extent=extent)
            except BaseException:
                extent.free()
                raise
        except TierUnavailableError:
            return None
        info = parse_trailer(self.arena.view(extent.offset, size)) if got == size else None
        if info is None:
            extent.free()
            self._missed(name, got)
            return None
        if name in self.account.entries:
            self.account.touch(name)
        return MooncakeHandle(info, extent)

    def _missed(self, name: BlobName, code: int) -> None:
        """Its segment may only be unreachable; what the master has never heard of is gone."""
        if code in (NOT_FOUND, GONE):
            self._forget(name)

    async def delete(self, name: BlobName) -> bool:
        code = await self._link.call("remove", self._key(name), True)
        if code not in (0, NOT_FOUND, GONE, NOT_READY):
            raise TierUnavailableError(f"--mooncake-master {self.options.master}: remove: {code}")
        self._forget(name)
        return bool(code == 0)

    async def quarantine(self, name: BlobName) -> None:
        """As in the interface. Where this raises, this service, but not the others, holds to it."""
        self._condemned.add(name)
        self.quarantined += await self.delete(name)
        self._condemned.discard(name)

    def stats(self) -> StoreStats:
        """Of what this service has put."""
        return StoreStats(
            kind=self.kind,
            capacity_bytes=self.account.capacity_bytes,
            used_bytes=self.account.used_bytes,
            blobs=len(self.account.entries),
            evictions=self.account.evictions,
            quarantined=self.quarantined,
            namespaces=self.account.by_namespace(),
        )

    def check_integrity(self) -> list[str]:
        return self.account.check_integrity() + self.arena.check_integrity()

    def _forget(self, name: BlobName, *, evicted: bool = False) -> None:
        if name in self.account.entries:
            self.account.remove(name, evicted=evicted)

    def _key(self, name: BlobName) -> str:
        return f"{self.options.prefix}/{name.namespace}/{name.key.hex()}"


def object_bytes(info: BlobInfo) -> int:
    """What a blob costs."""
    return info.num_bytes + len(info.layout) + FOOTER.size


def trailer(info: BlobInfo) -> bytes:
    """What follows the payload."""
    return info.layout + FOOTER.pack(info.checksum, info.num_bytes, len(info.layout), MAGIC)


def parse_trailer(content: memoryview) -> BlobInfo | None:
    """Of a whole object; None for what is none of ours."""
    if len(content) < FOOTER.size:
        return None
    checksum, num_bytes, layout_bytes, magic = FOOTER.unpack(content[-FOOTER.size :])
    if magic != MAGIC or num_bytes + layout_bytes + FOOTER.size != len(content) or not num_bytes:
        return None
    return BlobInfo(num_bytes, bytes(content[num_bytes : num_bytes + layout_bytes]), checksum)


def check_object(name: BlobName, info: BlobInfo) -> None:
    """Raises UsageError for what other services could not find again or read."""
    try:
        long = len(name.namespace.encode()) > 200
    except UnicodeEncodeError:
        long = True
    if long:
        raise UsageError("namespace", "at most 200 bytes of UTF-8", name.namespace)
    if len(name.key) != 32:
        raise UsageError("key", "32 bytes", len(name.key))
    if len(info.layout) > 4096:
        raise UsageError("layout", "at most 4096 bytes", len(info.layout))
    if len(info.checksum) != 16:
        raise UsageError("checksum", "16 bytes", len(info.checksum))


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
    """In a thread; what it raises is an answer too, so that nobody has to wait for it."""
    try:
        return function(*arguments)
    except Exception as error:
        return error


__all__ = ["MooncakeLink", "MooncakeOptions", "MooncakeStore"]
