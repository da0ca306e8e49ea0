"""The way from the soak's engines to their tier, which is not to be trusted.

engine ── TCP ──> proxy ── socket or TCP ──> tier

slow       every piece of a connection comes later: calls take ten times as long, or longer
           than their deadline
bit flips  every other large piece, either way, has one flipped bit: in a payload, nearly always
resets     connections are reset (RST) in the middle of their bytes
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

WAYS = SLOW, FLIPS, RESETS = "slow", "bit flips", "resets"
PIECE_BYTES = 1 << 16
# A piece of so many bytes is one of a payload.
LARGE_BYTES = 1 << 14
LATE_S = 0.03
FLIPPED, RESET = 0.5, 0.2


class Proxy:
    """Forwards what comes to `listen`, host:port, to `target`, a socket or host:port.

    fault: one of WAYS, for as long as it is set. done: pieces that came late, pieces with
    a flipped bit, and connections that were reset.
    """

    def __init__(self, listen: str, target: Path | str, rng: random.Random) -> None:
        self.listen, self._target, self._rng = listen, target, rng
        self._writers: set[asyncio.StreamWriter] = set()
        self._connections: set[asyncio.Task[None]] = set()
        self.fault: str | None = None
        self.done: Counter[str] = Counter()

    @asynccontextmanager
    async def forwarding(self) -> AsyncIterator[None]:
        """Forward until the block ends."""
        host, _, port = self.listen.rpartition(":")
        server = await asyncio.start_server(self._accept, host, int(port))
        try:
            yield
        finally:
            server.close()
            for writer in self._writers:
                writer.transport.abort()
            await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connect(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream, onward = await self._open()
        except OSError:
            writer.transport.abort()
            return
        both = {writer, onward}
        self._writers |= both
        await asyncio.gather(
            self._pump(reader, onward, writer), self._pump(upstream, writer, writer)
        )
        self._writers -= both

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._target, Path):
            return await asyncio.open_unix_connection(self._target)
        host, _, port = self._target.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        client: asyncio.StreamWriter,
    ) -> None:
        """Forward one direction of a client's connection, to its end."""
        with suppress(OSError):
            while data := await reader.read(PIECE_BYTES):
                if self.fault == SLOW:
                    self.done[SLOW] += 1
                    await asyncio.sleep(LATE_S)
                elif self.fault == FLIPS and len(data) >= LARGE_BYTES:
                    data = self._flipped(data)
                elif self.fault == RESETS and self._rng.random() < RESET:
                    self._reset(client)
                    break
                writer.write(data)
                await writer.drain()
        writer.close()

    def _flipped(self, data: bytes) -> bytes:
        if self._rng.random() >= FLIPPED:
            return data
        self.done[FLIPS] += 1
        found = bytearray(data)
        found[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        return bytes(found)

    def _reset(self, client: asyncio.StreamWriter) -> None:
        if client.transport.is_closing():
            return
        linger = struct.pack("ii", 1, 0)
        client.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        client.transport.abort()
        self.done[RESETS] += 1
