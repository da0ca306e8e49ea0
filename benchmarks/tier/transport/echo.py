"""A tier service that has no store: what the same gRPC can do when it only moves bytes.

    python -m benchmarks.tier.transport.echo --listen 127.0.0.1:0 --insecure-local

It is started, configured and connected to like the service. `/kvtier.bench.Echo` is any gRPC
program: Get answers with the same chunk again and again, Put drops what comes, as protobuf makes
and parses the messages. The service frames its chunks itself (kvtier.tier.wire), so it
may be faster.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest import mock

import grpc

from kvtier.tier.client import TierClient
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd import cli
from kvtier_tierd.options import TierOptions
from kvtier_tierd.server import TierServer

ECHO = "kvtier.bench.Echo"


def size_key(num_bytes: int) -> bytes:
    """The key of a blob of this size; the echo knows nothing else about it."""
    return num_bytes.to_bytes(32, "big")


class EchoService:
    """See the module docstring."""

    def __init__(self, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes

    async def echo_get(self, request: pb.GetRequest, context: Any) -> None:
        chunk = bytes(self.chunk_bytes)
        for key in request.keys:
            size = int.from_bytes(key, "big")
            header = pb.BlobHeader(key=key, num_bytes=size)
            await context.write(pb.GetResponse(header=header))
            for begin in range(0, size, self.chunk_bytes):
                await context.write(pb.GetResponse(chunk=chunk[: size - begin]))

    async def echo_put(
        self, requests: AsyncIterator[pb.PutRequest], context: Any
    ) -> pb.PutResponse:
        async for _ in requests:
            pass
        return pb.PutResponse(stored=True)

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        echo: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Get": grpc.unary_stream_rpc_method_handler(
                self.echo_get, pb.GetRequest.FromString, pb.GetResponse.SerializeToString
            ),
            "Put": grpc.stream_unary_rpc_method_handler(
                self.echo_put, pb.PutRequest.FromString, pb.PutResponse.SerializeToString
            ),
        }
        return [grpc.method_handlers_generic_handler(ECHO, echo)]


class EchoServer(TierServer):
    def __init__(self, options: TierOptions) -> None:
        super().__init__(options)
        echo = EchoService(options.chunk_bytes)
        self._server.add_generic_rpc_handlers(echo.handlers())


class EchoClient(TierClient):
    """Moves the messages that a TierClient moves, and looks at none of them."""

    def echo_get(self, num_bytes: int, count: int) -> None:
        get = self._connection.channel.unary_stream(
            f"/{ECHO}/Get", pb.GetRequest.SerializeToString, pb.GetResponse.FromString
        )
        for _ in get(pb.GetRequest(keys=[size_key(num_bytes)] * count)):
            pass

    def echo_put(self, num_bytes: int) -> None:
        chunk = bytes(self._chunk_bytes)

        def requests() -> Iterator[pb.PutRequest]:
            header = pb.BlobHeader(key=size_key(num_bytes), num_bytes=num_bytes)
            yield pb.PutRequest(header=header)
            for begin in range(0, num_bytes, len(chunk)):
                yield pb.PutRequest(chunk=chunk[: num_bytes - begin])

        put = self._connection.channel.stream_unary(
            f"/{ECHO}/Put", pb.PutRequest.SerializeToString, pb.PutResponse.FromString
        )
        put(requests())


def main() -> int:
    """The service's own command line, with a server that keeps nothing."""
    with mock.patch.object(cli, "TierServer", EchoServer):
        return cli.run()


if __name__ == "__main__":
    sys.exit(main())
