"""Segments that could not be read from, by the addresses of their processes.

Before it connects again the client waits for a second, with every object. A process that was
killed comes back at another address, so what only the old one has is as good as gone, though
the master says that it is there until it drops the segment.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvtier_tierd.stores.mooncake.link import PROBE_S, MooncakeLink, reached_from
from kvtier_tierd.stores.mooncake.options import P2P

SILENT_S = 10.0  # the master's client_ttl


class SilentSegments:
    """The segments that one service could not read from."""

    def __init__(self, link: MooncakeLink) -> None:
        self._link = link
        self._until: dict[str, float] = {}

    async def note(self, key: str) -> None:
        """This object could not be read; whose fault it was is seen by who does not listen.

        Raises TierUnavailableError, as `lost` does.
        """
        if self._link.options.metadata != P2P:
            return  # addresses are only names, with a metadata server
        for address in (await self._addresses([key])).get(key, ()):
            if address not in self._until and not await listens(address):
                self._until[address] = time.monotonic() + SILENT_S

    async def lost(self, keys: Sequence[str]) -> set[str]:
        """Return the objects that only silent segments have."""
        now = time.monotonic()
        self._until = {address: until for address, until in self._until.items() if until > now}
        if not self._until or not keys:
            return set()
        addresses = await self._addresses(keys)
        return {key for key, own in addresses.items() if own and own <= self._until.keys()}

    async def _addresses(self, keys: Sequence[str]) -> dict[str, set[str]]:
        """Addresses of the segments that have the objects; none for what may also be on a disk."""
        replicas = await self._link.call("batch_get_replica_desc", list(keys))
        return {
            key: {one.get_memory_descriptor().buffer_descriptor.transport_endpoint for one in all_}
            if all(one.is_memory_replica() for one in all_)
            else set()
            for key, all_ in replicas.items()
        }


async def listens(address: str) -> bool:
    """Return whether a process listens at this host:port."""
    host, _, port = address.rpartition(":")
    try:
        await reached_from(host, int(port), PROBE_S)
    except (OSError, TimeoutError):
        return False
    except ValueError:
        pass  # no address that could be asked
    return True
