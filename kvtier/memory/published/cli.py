"""`kvtier memory publish`, `list` and `withdraw`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.calibration.cli.listing import print_rows, rows_of
from kvtier.config import load_settings

if TYPE_CHECKING:
    from kvtier.calibration.documents import Document
    from kvtier.calibration.store.base import CalibrationStore

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

COLUMNS = (
    "name", "model", "revision", "prefix", "quality", "digest", "age", "ttl", "location",
)  # fmt: skip


def add_published_parsers(kinds: Subparsers) -> None:
    """Add the three commands; parsed arguments carry `handler`."""
    publish = kinds.add_parser(
        "publish", help="name a memory in the calibration store, for every server of its model"
    )
    publish.add_argument("memory", type=Path, metavar="DIR", help="its directory")
    publish.add_argument("--name", required=True, help="what to call it; replaces one so called")
    publish.add_argument("--location", metavar="PATH", help="DIR as servers see it (default: DIR)")
    publish.set_defaults(handler=run_publish)
    listing = kinds.add_parser("list", help="list what is published, for all models")
    listing.set_defaults(handler=run_list)
    withdraw = kinds.add_parser("withdraw", help="publish a memory no longer; its directory stays")
    withdraw.add_argument("name", metavar="NAME")
    withdraw.set_defaults(handler=run_withdraw)
    for parser in (publish, listing, withdraw):
        parser.add_argument(
            "--format", choices=("table", "json"), default="table", help="default: %(default)s"
        )


def run_publish(options: argparse.Namespace) -> int:
    """Handler of `kvtier memory publish`. Raises KvtierError."""
    from kvtier.memory.published.publishing import publish

    with _store() as store:
        key, change = publish(store, options.memory, options.name, options.location)
    columns = ("published", "change")
    print_rows([{"published": str(key), "change": change}], columns, options.format)
    return 0


def run_list(options: argparse.Namespace) -> int:
    """Handler of `kvtier memory list`. Raises StoreError."""
    from kvtier.memory.published.publishing import memory_keys

    with _store() as store:
        found = rows_of(store, memory_keys(store))
    rows = [_row(row, document) for row, document in found]
    print_rows(rows, COLUMNS, options.format)
    return 0


def run_withdraw(options: argparse.Namespace) -> int:
    """Handler of `kvtier memory withdraw`. Raises UsageError and StoreError."""
    from kvtier.memory.published.publishing import withdraw

    with _store() as store:
        key = withdraw(store, options.name)
    print_rows([{"withdrawn": str(key)}], ("withdrawn",), options.format)
    return 0


def _row(row: dict[str, Any], document: Document | None) -> dict[str, Any]:
    """A row of the calibration store with what one wants to know of a memory. digest: as servers
    say it."""
    from kvtier.calibration.documents import MemoryDocument
    from kvtier.calibration.documents.keys import parse_key

    known = document if isinstance(document, MemoryDocument) else None
    return {
        "name": getattr(parse_key(row["key"]), "name", None),
        **row,
        "prefix": known and known.prefix_tokens,
        "dtype": known and known.dtype,
        "digest": known and known.digest[:16],
        "location": known and known.location,
    }


def _store() -> CalibrationStore:
    from kvtier.calibration.store.opening import open_store

    return open_store(load_settings())


__all__ = ["add_published_parsers"]
