"""What tests of served memories share."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

from kvtier.memory.storage import PrefixMemory


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(6, 384) for _ in range(count)]


class Stored(NamedTuple):
    """A memory in its directory."""

    folder: Path
    memory: PrefixMemory

    @property
    def prefix(self) -> list[int]:
        return list(self.memory.prefix_ids)
