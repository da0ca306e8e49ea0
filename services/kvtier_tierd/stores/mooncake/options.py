"""The options of the store `mooncake`: the master, its segment and its room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from kvtier.errors import UsageError
from kvtier_tierd.stores.options import NUMBER, SIZE, SIZE_OR_ZERO, Flag, StoreOptions

MIN_SEGMENT_BYTES = 16 << 20  # the client's
P2P = "P2PHANDSHAKE"


@dataclass(frozen=True)
class MooncakeOptions(StoreOptions):
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

    kind: ClassVar[str] = "mooncake"

    master: Annotated[str, Flag("--mooncake-master", "host:port (%(default)s)")] = "127.0.0.1:50051"
    metadata: Annotated[str, Flag("--mooncake-metadata", "or an http URL (%(default)s)")] = P2P
    local_hostname: Annotated[
        str | None,
        Flag("--mooncake-local-hostname", "for the other services (as the master sees it)"),
    ] = None
    segment_bytes: Annotated[
        int, Flag("--mooncake-segment", "contributed, or 0 (%(default)s)", SIZE_OR_ZERO)
    ] = 4 << 30
    buffer_bytes: Annotated[
        int, Flag("--mooncake-buffer", "for transfers (%(default)s)", SIZE, least=1)
    ] = 2 << 30
    capacity_bytes: Annotated[
        int | None, Flag("--mooncake-capacity", "of what this service puts (its segment)", SIZE)
    ] = None
    replicas: Annotated[
        int, Flag("--mooncake-replicas", "segments per blob (%(default)s)", NUMBER, least=1)
    ] = 1
    prefix: str = "kvtier"
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
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

    @property
    def master_address(self) -> tuple[str, int]:
        """Port 0 where there is none."""
        host, _, port = self.master.rpartition(":")
        return host, int(port) if port.isascii() and port.isdigit() else 0

    @property
    def put_bytes(self) -> int:
        return self.segment_bytes if self.capacity_bytes is None else self.capacity_bytes
