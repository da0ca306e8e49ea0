"""The proxies between engine and tier in the fault benchmark, which are not to be trusted.

    Resetting    forwards TCP; once it is told to, it resets every connection after a few bytes
    Meddling     forwards gRPC, whatever the method; it answers late, or flips bits of payloads

Both listen where the engine looks for its tier.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import socket
import struct
import time
from collections.abc import AsyncIterator, Generator, MutableSequence
from contextlib import suppress
from typing import Any

import grpc
import numpy as np

from kvtier.tier.wire import NAMESPACE_METADATA
from kvtier.v1 import tier_pb2 as pb

PIECE_BYTES = 1 << 16
STOP_S = 5.0
# A connection is reset after at most so many bytes in either direction: in the middle of a call.
LONGEST_LIFE_BYTES = 1 << 20
SLOWER = 10
# Every other call that gets payloads is let alone: an engine that can use little of what it loads
# finds that computing is faster, and stops asking. Of the others' payloads nearly all are damaged,
# half of them by one flipped bit, the others by one in FLIPPED_BYTES bytes.
CALLS_DAMAGED, DAMAGED = 0.5, 0.9
FLIPPED_BYTES = 100

# The dials of a Meddling proxy: what it is told and what it counts, in memory that its parent
# shares.
SLOW, FLIP, SLOWED, CUT_OFF, BIT, PERCENT, INTACT = range(7)
DIALS = 7


class Resetting:
    """See the module docstring. resets: connections that clients saw reset, after some bytes."""

    def __init__(self, listen: str, target: str, seed: int) -> None:
        self._listen, self._target = listen.rpartition(":"), target.rpartition(":")
        self._chance = random.Random(seed)
        self._writers: set[asyncio.StreamWriter] = set()
        self.active = False
        self.resets = 0

    async def start(self) -> None:
        host, _, port = self._listen
        self._server = await asyncio.start_server(self._accepted, host, int(port))

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target
        try:
            upstream, onward = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, onward}
        left = [self._chance.randrange(1, LONGEST_LIFE_BYTES)]
        await asyncio.gather(
            self._pump(reader, onward, writer, left), self._pump(upstream, writer, writer, left)
        )
        self._writers -= {writer, onward}

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        client: asyncio.StreamWriter,
        left: list[int],
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(PIECE_BYTES):
                left[0] -= len(data)
                if self.active and left[0] < 0 and not client.transport.is_closing():
                    self._reset(client)
                    break
                writer.write(data)
                await writer.drain()
        writer.close()

    def _reset(self, client: asyncio.StreamWriter) -> None:
        connection = client.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.transport.abort()
        self.resets += 1

    async def stop(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(others, timeout=STOP_S) if others else None


class Meddling(grpc.GenericRpcHandler):
    """See the module docstring. On the wire a unary call is a stream of one message each way, so
    one handler will do for all. dials: DIALS integers."""

    def __init__(self, channel: grpc.aio.Channel, dials: MutableSequence[int], seed: int) -> None:
        self._channel, self._dials = channel, dials
        self._chance = np.random.default_rng(seed)

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_stream_rpc_method_handler(functools.partial(self._pass, details.method))

    async def _pass(
        self, method: str, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        began = time.perf_counter()
        metadata = [(k, v) for k, v in context.invocation_metadata() if k == NAMESPACE_METADATA]
        passing: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
        passing = self._channel.stream_stream(method)
        call = passing(timeout=context.time_remaining(), metadata=metadata)
        onward = asyncio.create_task(_forward(requests, call))
        damage = self._damage() if method.endswith("/Get") else None
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                assert isinstance(response, bytes)
                yield response if damage is None else damage.send(response)
            if (code := await call.code()) is not grpc.StatusCode.OK:
                await context.abort(code, await call.details())
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "")
        finally:
            onward.cancel()
            call.cancel()
        if self._dials[SLOW]:
            await self._linger((SLOWER - 1) * (time.perf_counter() - began))

    async def _linger(self, seconds: float) -> None:
        """Sleep until the call has taken SLOWER times what it would have."""
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self._dials[CUT_OFF] += 1
            raise
        self._dials[SLOWED] += 1

    def _damage(self) -> Generator[bytes, bytes, None]:
        """Takes the messages of a Get and gives them back, some payloads damaged."""
        pieces = self._damaging()
        next(pieces)
        return pieces

    def _damaging(self) -> Generator[bytes, bytes, None]:
        at: dict[str, Any] = {"place": None, "position": 0, "kind": INTACT}
        share = DAMAGED if self._chance.random() < CALLS_DAMAGED else 0.0
        given = b""
        for _ in itertools.count():
            message = yield given
            response = pb.GetResponse.FromString(message)
            part = response.WhichOneof("part")
            given = message
            if part == "header":
                self._draw(at, response.header.num_bytes, share)
            elif part == "chunk":
                given = self._damaged(at, response.chunk) or message

    def _draw(self, at: dict[str, Any], num_bytes: int, share: float) -> None:
        """Draw what happens to the payload that begins, of a call of which this share is
        damaged."""
        kind = INTACT
        if self._dials[FLIP] and self._chance.random() < share:
            kind = BIT if self._chance.random() < 0.5 else PERCENT
        if self._dials[FLIP]:
            self._dials[kind] += 1
        at.update(kind=kind, position=0, place=int(self._chance.integers(num_bytes)))

    def _damaged(self, at: dict[str, Any], chunk: bytes) -> bytes | None:
        begin, at["position"] = at["position"], at["position"] + len(chunk)
        if at["kind"] == BIT and begin <= at["place"] < at["position"]:
            places = np.array([at["place"] - begin])
        elif at["kind"] == PERCENT:
            count = -(-len(chunk) // FLIPPED_BYTES)
            places = self._chance.choice(len(chunk), count, replace=False)
        else:
            return None
        data = np.frombuffer(chunk, np.uint8).copy()
        data[places] ^= (1 << self._chance.integers(8, size=len(places))).astype(np.uint8)
        return pb.GetResponse(chunk=data.tobytes()).SerializeToString()


async def _forward(requests: AsyncIterator[bytes], call: Any) -> None:
    """Requests, until the service has heard enough: it may answer before it has heard all."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        async for request in requests:
            await call.write(request)
        await call.done_writing()
