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
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.calibration.documents import (
    CurveDocument,
    Document,
    MemoryDocument,
    ProfileDocument,
    WorthDocument,
)
from kvtier.calibration.keys import parse_key
from kvtier.calibration.store.base import CalibrationStore, StoredKey
from kvtier.calibration.store.directory import open_store
from kvtier.calibration.store.transfer import (
    export_documents,
    import_documents,
    must_get,
    read_export,
)
from kvtier.config import load_settings
from kvtier.errors import CalibrationDocumentError, UsageError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


NOTHING = "-"
PLAIN_WIDTH = 200


def rows_of(
    store: CalibrationStore, stored: Iterable[StoredKey]
) -> list[tuple[dict[str, Any], Document | None]]:
    """One row for each key, beside its document. A document that cannot be read is shown as such,
    not hidden; None then, and where it has expired since it was listed."""
    return [_row(store, one) for one in stored]


def _row(store: CalibrationStore, stored: StoredKey) -> tuple[dict[str, Any], Document | None]:
    row = {
        "kind": stored.key.kind,
        "model": stored.key.model,
        "revision": stored.key.revision,
        "policy": stored.key.policy,
        "age_s": None,
        "ttl_s": stored.ttl_s,
        "quality": None,
        "key": str(stored.key),
    }
    try:
        document = store.get(stored.key)
    except CalibrationDocumentError as error:
        problem = f"invalid: {str(error).removeprefix(f'{stored.key}: ')}"
        return row | {"quality": problem}, None
    if document is None:
        return row, None
    age_s = (datetime.now(UTC) - document.created_at).total_seconds()
    return row | {"age_s": age_s, "quality": quality_of(document)}, document


def quality_of(document: Document) -> str:
    """Return the number that one looks at first: the error of a curve, the share of heads of a
    profile, the size of what tokens are worth, what requests lose by a memory."""
    if isinstance(document, CurveDocument):
        held_out = document.held_out_rmse
        unseen = "" if held_out is None else f", held out {held_out:.3f}"
        return f"rmse {document.rmse:.3f}{unseen}"
    if isinstance(document, ProfileDocument):
        return f"{document.profile.ca_share:.1%} of heads"
    if isinstance(document, WorthDocument):
        return f"{len(document.weights) / 2**20:.1f} MiB"
    assert isinstance(document, MemoryDocument), "a document of no known kind"
    if document.nll_gap is None or document.held_share is None:
        return "not measured"
    return f"loses {document.nll_gap:.3f} nats, holds {document.held_share:.0%}"


def format_seconds(seconds: float | None) -> str:
    """A span for people, in its largest whole unit: 93784 -> '1 d'."""
    if seconds is None:
        return NOTHING
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def print_rows(rows: Sequence[dict[str, Any]], columns: Sequence[str], form: str) -> None:
    """form: "json" for all of each row, "table" for its columns; age and ttl are in `age_s` and
    `ttl_s`."""
    if form == "json":
        print(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row, column) for column in columns))
    # A key is printed as it is: to rich, the model of kvtier:v1:memory:llama:… is an animal.
    as_is = partial(Console, highlight=False, markup=False, emoji=False)
    console = as_is()
    # A pipe has no width; keys must come out in one piece.
    (console if console.is_terminal else as_is(width=PLAIN_WIDTH)).print(table)


def _cell(row: dict[str, Any], column: str) -> str:
    if column in ("age", "ttl"):
        return format_seconds(row[f"{column}_s"])
    return NOTHING if row[column] is None else str(row[column])


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
    with configured_store() as store:
        rows = [row for row, _ in rows_of(store, store.list())]
    print_rows(rows, COLUMNS, options.format)
    return 0


def _show(options: argparse.Namespace) -> int:

    key = parse_key(options.key, "KEY")
    with configured_store() as store:
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

    key = None if options.key is None else parse_key(options.key, "KEY")
    with configured_store() as store:
        written = export_documents(store, options.file, key)
    print_rows([{"exported": str(one)} for one in written], ("exported",), options.format)
    return 0


def _import(options: argparse.Namespace) -> int:

    documents = read_export(options.file)
    with configured_store() as store:
        outcome = import_documents(store, documents)
    rows = [{"imported": str(key), "change": change} for key, change in outcome]
    print_rows(rows, ("imported", "change"), options.format)
    return 0


def _delete(options: argparse.Namespace) -> int:

    keys = [parse_key(text, "KEY") for text in options.keys]
    with configured_store() as store:
        gone = [key for key in keys if store.delete(key)]
    print_rows([{"deleted": str(key)} for key in gone], ("deleted",), options.format)
    if missing := [str(key) for key in keys if key not in gone]:
        raise UsageError("KEY", "stored keys (see `kvtier calibration list`)", " ".join(missing))
    return 0


def configured_store() -> CalibrationStore:
    """The store that the settings mean."""

    return open_store(load_settings())
