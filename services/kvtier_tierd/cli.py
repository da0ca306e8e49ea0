"""`kvtier tier` and `python -m kvtier_tierd`: run a tier service until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from kvtier.errors import KvtierError, UsageError
from kvtier.sizes import parse_size
from kvtier_tierd.limits import Limits
from kvtier_tierd.options import TierOptions
from kvtier_tierd.server import TierServer
from kvtier_tierd.stores.registry import STORES, parse_store, store_flags

# The parameters' numbers are those of malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MALLOC_KEEP_BYTES = 1 << 30
DEFAULT_SHARED_DIRECTORY = Path("/dev/shm")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 after an orderly end. Raises KvtierError for bad input."""
    options = parse(argv)
    keep_freed_memory()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    uvloop.run(serve(options))
    return 0


def keep_freed_memory() -> None:
    """Let glibc keep the memory of chunks: by default every freed megabyte goes back to the kernel,
    which clears it again for the next one, and streams spend most of their time on that."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, MALLOC_KEEP_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, MALLOC_KEEP_BYTES)


async def serve(options: TierOptions) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    server = TierServer(options)
    await server.start()
    try:
        # One line that scripts can wait for; `listen` may have asked for any free port.
        _say(f"kvtier tier: {server.store.kind} store on {server.address}")
        if server.web is not None:
            _say(f"kvtier tier: metrics on {server.web.url}/metrics")
        await ended.wait()
        _say("kvtier tier: draining")
    finally:
        await server.stop()


def _say(text: str) -> None:
    """Print a line, if it is still read: the parent process may read one and hang up."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), sys.stdout.fileno())


def parse(argv: Sequence[str] | None) -> TierOptions:
    """Raises UsageError naming the flag."""
    given = _parser().parse_args(argv)
    shared = None if given.shared_memory == "off" else Path(given.shared_memory)
    if shared is not None and not shared.is_dir():
        # The default directory is a convenience where it exists; a chosen one has to.
        if shared != DEFAULT_SHARED_DIRECTORY:
            raise UsageError("--shared-memory", "a directory, or off", given.shared_memory)
        shared = None
    # Argparse has the value of --disk-path under disk_path.
    typed = {name: vars(given)[name[2:].replace("-", "_")] for name in store_flags()}
    return TierOptions(
        listen=given.listen,
        store=parse_store(given.store, typed),
        shared_directory=shared,
        namespaces=_namespaces(given.namespace, given.in_flight),
        in_flight=given.in_flight,
        certificate=given.certificate,
        key=given.key,
        client_ca=given.client_ca,
        insecure_local=given.insecure_local,
        insecure=given.insecure,
        max_blob_bytes=parse_size(given.max_blob, "--max-blob"),
        metrics_port=given.metrics_port,
        metrics_host=given.metrics_host,
        transfer_bytes=parse_size(given.transfer_memory, "--transfer-memory"),
        stall_s=given.stall_s,
        drain_s=given.drain_s,
        otlp_traces_endpoint=given.otlp_traces_endpoint,
    )


def _namespaces(given: Sequence[str], in_flight: int) -> dict[str, Limits]:
    """Limits by namespace; each given as NAME, NAME=QUOTA, NAME=QUOTA,RATE or NAME=,RATE."""
    limits: dict[str, Limits] = {}
    for text in given:
        name, _, bounds = text.partition("=")
        if name in limits:
            raise UsageError("--namespace", "every name once", text)
        quota, _, rate = bounds.partition(",")
        most, bytes_per_s = (
            parse_size(one, "--namespace") if one else None for one in (quota, rate)
        )
        limits[name] = Limits(most, in_flight, bytes_per_s)
    return limits


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvtier tier", description="Serve exact KV from this machine's memory and disk."
    )
    defaults = TierOptions()
    add = parser.add_argument
    add("--listen", default=defaults.listen, help="host:port or unix:/path (%(default)s)")
    add("--store", default=defaults.store.kind, help=f"one of {', '.join(STORES)} (%(default)s)")
    for name, flag in store_flags().items():
        # Without a default, so that a flag of another store is noticed where it is typed.
        shown = flag.help % {"default": flag.default}
        add(name, metavar=flag.type.metavar, help=shown)
    add(
        "--shared-memory",
        default=str(DEFAULT_SHARED_DIRECTORY),
        metavar="DIRECTORY",
        help="where the memory is a file that clients of this user map, or off (%(default)s)",
    )
    add(
        "--namespace",
        action="append",
        default=[],
        metavar="NAME[=QUOTA[,RATE]]",
        help="serve this namespace, with a quota in bytes and streams of so many bytes a second; "
        "below 100m engines give up on what takes them longer; repeat (every name, without either)",
    )
    add("--in-flight", type=int, default=64, help="transfers of a namespace at a time (64)")
    add("--certificate", type=Path, metavar="PEM", help="of the server, for mutual TLS")
    add("--key", type=Path, metavar="PEM", help="of the certificate")
    add("--client-ca", type=Path, metavar="PEM", help="who signs clients; their names are theirs")
    add(
        "--insecure-local",
        action="store_true",
        help="plaintext for every user of this machine: loopback, or a socket others may open",
    )
    add("--insecure", action="store_true", help="plaintext for every client that reaches --listen")
    add("--max-blob", default="1g", metavar="BYTES", help="larger blobs are refused (%(default)s)")
    add("--metrics-port", type=int, help="Prometheus /metrics, and /livez and /readyz; 0: any port")
    add("--metrics-host", default=defaults.metrics_host, help="where they listen (%(default)s)")
    add(
        "--transfer-memory",
        default="2g",
        metavar="BYTES",
        help="for payloads on their way, beside the store; a namespace has half (%(default)s)",
    )
    add("--stall-s", type=float, default=10.0, help="until a stream that stalls ends (%(default)s)")
    add(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="of an OpenTelemetry collector (gRPC), for spans of calls that engines trace",
    )
    add("--drain-s", type=float, default=10.0, help="for running calls at the end (%(default)s)")
    return parser


def run() -> int:
    """`python -m kvtier_tierd`."""
    try:
        return main()
    except KvtierError as error:
        print(f"kvtier: error: {error}", file=sys.stderr)
        return 2
