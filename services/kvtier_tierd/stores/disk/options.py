"""The options of the store `disk`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from kvtier_tierd.stores.options import DIRECTORY, SIZE, Flag, StoreOptions


@dataclass(frozen=True)
class DiskOptions(StoreOptions):
    """disk_path: the directory, without which there is no store. disk_bytes: its capacity."""

    kind: ClassVar[str] = "disk"

    disk_path: Annotated[Path | None, Flag("--disk-path", "of the disk store", DIRECTORY)] = None
    disk_bytes: Annotated[int, Flag("--disk", "of the disk store (%(default)s)", SIZE, least=1)] = (
        64 << 30
    )


__all__ = ["DiskOptions"]
