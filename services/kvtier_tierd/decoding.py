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
# This stands for a request that is no message, from where it is decoded to where the call can be
# ended.
UNDECODABLE = object()

logger = logging.getLogger(__name__)


class DecodingGuard(grpc.aio.ServerInterceptor):
    """Every handler of a server, with requests that do not decode answered here.

    failed: told of each, with the method's name and the status that it got.
    """

    def __init__(self, failed: Callable[[str, str], None]) -> None:
        self._failed = failed
        # One warning in LOG_EVERY_S seconds; the next one says how many were not given.
        self._next_at, self._unsaid = float("-inf"), 0
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
        behavior = getattr(handler, kind)

        async def checked(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            async for request in requests:
                if request is UNDECODABLE:
                    await self._refuse(method, context)
                yield request

        async def prepared(request: Any, context: Any) -> Any:
            if handler.request_streaming:
                return checked(request, context)
            if request is UNDECODABLE:
                await self._refuse(method, context)
            return request

        async def call(request: Any, context: Any) -> Any:
            return await behavior(await prepared(request, context), context)

        async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
            async for response in behavior(await prepared(request, context), context):
                yield response

        # It matters to gRPC whether a behavior is a coroutine function or a generator.
        guard = generate if inspect.isasyncgenfunction(behavior) else call
        make: Any = getattr(grpc, f"{kind}_rpc_method_handler")
        guarded: grpc.RpcMethodHandler[Any, Any] = make(
            guard,
            request_deserializer=_lenient(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )
        return guarded

    async def _refuse(self, method: str, context: Any) -> None:
        """Raises what ends the call, wherever its handler is waiting for requests."""
        self._failed(method, grpc.StatusCode.INVALID_ARGUMENT.name)
        now = time.monotonic()
        if now < self._next_at:
            self._unsaid += 1
        else:
            more = f" (and {self._unsaid} more like it since)" if self._unsaid else ""
            said = "%s: a request that is no protobuf message, from %s" + more
            logger.warning(said, method, context.peer())
            self._next_at, self._unsaid = now + LOG_EVERY_S, 0
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
