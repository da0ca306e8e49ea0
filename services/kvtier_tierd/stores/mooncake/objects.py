"""A blob as one object of Mooncake Store.

    object  0           num_bytes
            [ payload ][ layout ][ checksum 16 | num_bytes 8 | layout's bytes 4 | magic 8 ]

A blob is one object, so it is there whole or not at all; the parts that describe it follow the
payload, which so begins at a page of the staging memory.
"""

from __future__ import annotations

import struct

from kvtier.errors import UsageError
from kvtier_tierd.stores.base import BlobInfo, BlobName

FOOTER = struct.Struct("<16sQI8s")
MAGIC = b"kvtier/1"


def object_bytes(info: BlobInfo) -> int:
    """Return the bytes that a blob costs."""
    return info.num_bytes + len(info.layout) + FOOTER.size


def trailer(info: BlobInfo) -> bytes:
    """Return the bytes that follow the payload."""
    return info.layout + FOOTER.pack(info.checksum, info.num_bytes, len(info.layout), MAGIC)


def parse_trailer(content: memoryview) -> BlobInfo | None:
    """Return what the trailer of a whole object says; None where the object is none of ours."""
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


__all__ = ["check_object", "object_bytes", "parse_trailer", "trailer"]
