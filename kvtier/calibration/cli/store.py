"""`kvtier calibration`: look into the calibration store and carry documents between stores.

    kvtier calibration list                 what is stored, how old, for how long
    kvtier calibration show KEY             one document
    kvtier calibration export FILE [KEY]    all documents, or one, into a JSON file
    kvtier calibration import FILE          ... and back, validated before anything is written
    kvtier calibration delete KEY...

The store is that of the settings: `KVTIER_REDIS_URL`, or the files of `KVTIER_DATA_DIR`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.calibration.cli.listing import print_rows, rows_of
from kvtier.config import load_settings

if TYPE_CHECKING:
    from kvtier.calibration.store.base import CalibrationStore

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

COLUMNS = ("kind", "model", "revision", "policy", "age", "ttl", "quality", "key")


def add_calibration_parser(subparsers: Subparsers) -> None:
    """Add `calibration`; parsed arguments carry the handler as `handler`."""
    parser = subparsers.add_parser("calibration", help="look into the calibration store")
    actions = parser.add_subparsers(dest="calibration", required=True, metavar="ACTION")
    _add(actions, "list", _list, "list what is stored")
    show = _add(actions, "show", _show, "print one document", default="json")
    show.add_argument("key", metavar="KEY")
    export = _add(actions, "export", _export, "write documents to a JSON file")
    export.add_argument("file", type=Path, metavar="FILE")
    export.add_argument("key", nargs="?", metavar="KEY", help="only this one")
    load = _add(actions, "import", _import, "store the documents of a JSON file")
    load.add_argument("file", type=Path, metavar="FILE")
    delete = _add(actions, "delete", _delete, "delete documents")
    delete.add_argument("keys", nargs="+", metavar="KEY")


def _add(
    actions: Subparsers, name: str, handler: Any, text: str, default: str = "table"
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text)
    parser.add_argument(
        "--format", choices=("table", "json"), default=default, help="default: %(default)s"
    )
    parser.set_defaults(handler=handler)
    return parser


def _list(options: argparse.Namespace) -> int:
    with _store() as store:
        rows = [row for row, _ in rows_of(store, store.list())]
    print_rows(rows, COLUMNS, options.format)
    return 0


def _show(options: argparse.Namespace) -> int:
    from kvtier.calibration.documents.keys import parse_key
    from kvtier.calibration.store.transfer import must_get

    key = parse_key(options.key, "KEY")
    with _store() as store:
        found = must_get(store, key).model_dump(mode="json")
    if options.format == "json":
        print(json.dumps(found, indent=2))
    else:
        if evidence := found.get("evidence"):
            evidence["points"] = len(evidence["points"])  # hundreds, for programs to read
        if weights := found.get("weights"):
            found["weights"] = f"{len(weights)} characters"
        rows = [{"field": name, "value": json.dumps(value)} for name, value in found.items()]
        print_rows(rows, ("field", "value"), options.format)
    return 0


def _export(options: argparse.Namespace) -> int:
    from kvtier.calibration.documents.keys import parse_key
    from kvtier.calibration.store.transfer import export_documents

    key = None if options.key is None else parse_key(options.key, "KEY")
    with _store() as store:
        written = export_documents(store, options.file, key)
    print_rows([{"exported": str(one)} for one in written], ("exported",), options.format)
    return 0


def _import(options: argparse.Namespace) -> int:
    from kvtier.calibration.store.transfer import import_documents, read_export

    documents = read_export(options.file)
    with _store() as store:
        outcome = import_documents(store, documents)
    rows = [{"imported": str(key), "change": change} for key, change in outcome]
    print_rows(rows, ("imported", "change"), options.format)
    return 0


def _delete(options: argparse.Namespace) -> int:
    from kvtier.calibration.documents.keys import parse_key
    from kvtier.errors import UsageError

    keys = [parse_key(text, "KEY") for text in options.keys]
    with _store() as store:
        gone = [key for key in keys if store.delete(key)]
    print_rows([{"deleted": str(key)} for key in gone], ("deleted",), options.format)
    if missing := [str(key) for key in keys if key not in gone]:
        raise UsageError("KEY", "stored keys (see `kvtier calibration list`)", " ".join(missing))
    return 0


def _store() -> CalibrationStore:
    from kvtier.calibration.store.opening import open_store

    return open_store(load_settings())
