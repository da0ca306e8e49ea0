"""A TCP proxy that can be slow, and can reset every connection through it."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from waiting import SAFETY_S, be_slow_async


class TcpProxy:
    """Forwards 127.0.0.1:port to `target`. delay_s: before every piece, in both directions."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self.delay_s = 0.0
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(self._start(), self._loop)
        self.address = f"127.0.0.1:{started.result(SAFETY_S)}"

    async def _start(self) -> int:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream, onward = await asyncio.open_connection(self._host, int(self._port))
        except OSError:
            writer.transport.abort()
            return
        both = {writer, onward}
        self._writers |= both
        await asyncio.gather(self._pump(reader, onward), self._pump(upstream, writer))
        self._writers -= both

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if self.delay_s:
                    await be_slow_async(self.delay_s)
                writer.write(data)
                await writer.drain()
        writer.close()

    def reset(self) -> None:
        """Reset every connection there is now."""
        self._loop.call_soon_threadsafe(self._reset)

    def _reset(self) -> None:
        for writer in self._writers:
            connection = writer.get_extra_info("socket")
            # One that was just lost has no socket any more.
            if connection is not None:
                linger = struct.pack("ii", 1, 0)
                with suppress(OSError):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()

    async def _stop(self) -> None:
        self._server.close()
        self._reset()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(others, timeout=SAFETY_S) if others else None

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(SAFETY_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SAFETY_S)
        self._loop.close()


@contextmanager
def tcp_proxy(target: str) -> Iterator[TcpProxy]:
    proxy = TcpProxy(target)
    try:
        yield proxy
    finally:
        proxy.stop()
