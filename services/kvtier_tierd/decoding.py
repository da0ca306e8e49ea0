"""Requests that are no messages: INVALID_ARGUMENT, counted, and a line of log now and then.

gRPC answers bytes that do not decode with UNKNOWN and logs a traceback for each, as for a bug of
ours. They are the client's, and any client that may connect could fill the log with them.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

LOG_EVERY_S = 10.0

Prepare = Callable[[Any, Any], Any]


class SeldomLog:
    """Warnings through `logger`, one in `every_s` seconds; the next one says how many were not."""

    def __init__(
        self,
        logger: logging.Logger,
        every_s: float = LOG_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger, self._every_s, self._clock = logger, every_s, clock
        self._next_at = float("-inf")
        self._unsaid = 0

    def warning(self, text: str, *arguments: object) -> None:
        now = self._clock()
        if now < self._next_at:
            self._unsaid += 1
            return
        more = f" (and {self._unsaid} more like it since)" if self._unsaid else ""
        self._logger.warning(text + more, *arguments)
        self._next_at, self._unsaid = now + self._every_s, 0


class Undecodable:
    """Stands for a request that is no message, on its way from where it is decoded to where
    the call can be ended."""


UNDECODABLE = Undecodable()


class DecodingGuard(grpc.aio.ServerInterceptor):
    """Every handler of a server, with requests that do not decode answered here.

    failed: told of each, with the method's name and the status that it got.
    """

    def __init__(self, failed: Callable[[str, str], None]) -> None:
        self._failed = failed
        self._log = SeldomLog(logging.getLogger(__name__))
        # A handler is the same object for every call of its method, so its id is the key.
        self._guarded: dict[int, tuple[Any, Any]] = {}

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None:
            return handler
        known = self._guarded.get(id(handler))
        if known is None or known[0] is not handler:
            method = details.method.rpartition("/")[2]
            known = self._guarded[id(handler)] = (handler, self._guard(handler, method))
        return known[1]

    def _guard(self, handler: Any, method: str) -> grpc.RpcMethodHandler[Any, Any]:
        kinds = ("unary", "stream")
        kind = f"{kinds[handler.request_streaming]}_{kinds[handler.response_streaming]}"
        prepare = self._messages if handler.request_streaming else self._message
        make: Any = getattr(grpc, f"{kind}_rpc_method_handler")
        guarded: grpc.RpcMethodHandler[Any, Any] = make(
            _prepared(getattr(handler, kind), prepare(method)),
            request_deserializer=_lenient(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )
        return guarded

    def _message(self, method: str) -> Prepare:
        async def prepare(request: Any, context: Any) -> Any:
            if request is UNDECODABLE:
                await self._refuse(method, context)
            return request

        return prepare

    def _messages(self, method: str) -> Prepare:
        async def decoded(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            async for request in requests:
                if request is UNDECODABLE:
                    await self._refuse(method, context)
                yield request

        async def prepare(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            return decoded(requests, context)

        return prepare

    async def _refuse(self, method: str, context: Any) -> None:
        """Raises what ends the call, wherever its handler is waiting for requests."""
        self._failed(method, grpc.StatusCode.INVALID_ARGUMENT.name)
        self._log.warning("%s: a request that is no protobuf message, from %s", method,
                          context.peer())  # fmt: skip
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT, f"{method}: the request is no protobuf message"
        )


def _lenient(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decoded(message: bytes) -> Any:
        try:
            return decode(message)
        except DecodeError:
            return UNDECODABLE

    return decoded


def _prepared(behavior: Callable[..., Any], prepare: Prepare) -> Callable[..., Any]:
    """The behavior of a handler, with `prepare` before it. gRPC asks whether it is a coroutine
    function or a generator, so it stays what it is."""
    if inspect.isasyncgenfunction(behavior):

        async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
            async for response in behavior(await prepare(request, context), context):
                yield response

        return generate

    async def call(request: Any, context: Any) -> Any:
        return await behavior(await prepare(request, context), context)

    return call


__all__ = ["DecodingGuard", "SeldomLog"]
