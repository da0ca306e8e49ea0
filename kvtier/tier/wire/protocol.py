"""The conventions of both ends besides the messages: the version, and how memory is shared."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.errors import TierProtocolError

PROTOCOL_VERSION = 1

# The metadata key of a call's namespace without TLS; with it, the certificate says who is calling.
NAMESPACE_METADATA = "kvtier-namespace"
DEFAULT_NAMESPACE = "default"

# The file that clients on the same host map is called so, and begins with a random token.
SHARED_FILE_PREFIX = "kvtier-tier-"
SHARED_TOKEN_BYTES = 16

MIN_CHUNK_BYTES = 4 << 10
MAX_CHUNK_BYTES = 64 << 20
# The most bytes of one layer's newest queries, which travel in one message.
MAX_QUERIES_BYTES = 4 << 20
# The most bytes around the payload of a message: header, layout and framing.
MESSAGE_OVERHEAD_BYTES = 64 << 10


def check_version(theirs: int, address: str) -> None:
    """Raise TierProtocolError unless a server speaks PROTOCOL_VERSION."""
    if theirs != PROTOCOL_VERSION:
        raise TierProtocolError(
            f"tier {address} speaks protocol version {theirs}, this is {PROTOCOL_VERSION}"
        )


def negotiate(theirs: Iterable[int]) -> int:
    """The version that a server answers a client with; one that says nothing gets ours.

    Raises TierProtocolError where there is none in common.
    """
    offered = list(theirs)
    if offered and PROTOCOL_VERSION not in offered:
        raise TierProtocolError(f"protocol version {PROTOCOL_VERSION} only, not {offered}")
    return PROTOCOL_VERSION
