"""`kvtier memory` and its commands."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.calibration.documents import Document, MemoryDocument
from kvtier.calibration.keys import parse_key
from kvtier.calibration.store_cli import configured_store, print_rows, rows_of
from kvtier.errors import UsageError
from kvtier.heads.cli import MODEL_HELP
from kvtier.heads.model.config import located
from kvtier.heads.progress import shown_progress
from kvtier.memory.recipe import Recipe
from kvtier.reading import read_text

if TYPE_CHECKING:
    from kvtier.memory.making import Source
    from kvtier.memory.storage import Card

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


TARGET_NATS = 0.05
# The width of a card that is not printed on a terminal.
PLAIN_WIDTH = 120
# Differences of a row that verifying overlooks: sums are made in another order.
SAME = 1e-3


def add_memory_parser(commands: Subparsers) -> None:
    """Add `kvtier memory`; parsed arguments carry `handler`."""
    memory = commands.add_parser("memory", help="prefix memories: build, verify and publish")
    kinds = memory.add_subparsers(required=True, metavar="ACTION")
    build = kinds.add_parser("build", help="build a memory of a prefix from traces of requests")
    _add_source(build)
    build.add_argument("--out", type=Path, required=True, help="directory to write")
    _add_recipe(build.add_argument_group("what the memory is made of"))
    build.add_argument(
        "--target-nats", type=float, default=TARGET_NATS,
        help="what answers may lose per token before the memory is not served (%(default)s)",
    )  # fmt: skip
    build.set_defaults(handler=run_build)
    show = kinds.add_parser("show", help="print a memory's card")
    show.add_argument("memory", type=Path, help="its directory")
    show.add_argument("--format", choices=("table", "json"), default="table")
    show.set_defaults(handler=run_show)
    check = kinds.add_parser("verify", help="measure a memory again, and compare with its card")
    check.add_argument("memory", type=Path, help="its directory")
    _add_source(check)
    check.set_defaults(handler=run_verify)
    add_published_parsers(kinds)


def _add_source(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model-path", required=True, help=MODEL_HELP)
    add("--prefix-file", type=Path, required=True, help="text that the requests begin with")
    add(
        "--traces", type=Path, required=True, metavar="FILE.jsonl",
        help='requests, one per line: {"prompt": …, "answer": …, "group": …}, or {"messages": …}',
    )  # fmt: skip
    add(
        "--chat", action="store_true",
        help="the prefix is a system message, in whose chat template the requests are",
    )  # fmt: skip
    add("--seed", type=int, default=0)
    add("-q", "--quiet", action="store_true", help="no progress")


def _add_recipe(group: argparse._ArgumentGroup) -> None:

    default, add = Recipe(), group.add_argument
    add("--kept-share", type=float, default=default.kept_share,
        help="share of the prefix's KV that is kept, by the heads that traces attend with most "
        "(%(default)s)")  # fmt: skip
    add("--entries", type=int, default=default.entries,
        help="queries that stand for all, per layer that looks up (%(default)s)")  # fmt: skip
    add("--state-heads", type=float, default=default.state_heads,
        help="share of the KV heads that attention states answer, those that they serve best; "
        "0: entries only tell which requests are like the traces (%(default)s)")  # fmt: skip
    add("--key-width", type=int, default=default.key_width,
        help="numbers that a query is looked up by (%(default)s)")  # fmt: skip
    add("--place-weight", type=float, default=default.place_weight,
        help="how much the place behind the prefix counts in a lookup (%(default)s)")  # fmt: skip
    add("--gate", type=float, default=default.gate,
        help="share of the traces' lookups that count as too far from every entry "
        "(%(default)s)")  # fmt: skip
    add("--no-store-queries", type=int, nargs="?", const=5, default=1, metavar="MEMBERS",
        dest="least_members",
        help="store no entry that stands for fewer queries than this (5): nobody's own "
        "question can be read back")  # fmt: skip


def run_build(options: argparse.Namespace) -> int:
    """Handler of `kvtier memory build`. Raises KvtierError; returns 0, and 1 for a memory that must
    not be served."""
    from kvtier.memory.making import make

    recipe = Recipe(**{one.name: getattr(options, one.name) for one in fields(Recipe)})
    if options.target_nats < 0:
        raise UsageError("--target-nats", "at least 0", options.target_nats)
    if options.out.exists() and not options.out.is_dir():
        raise UsageError("--out", "a directory", str(options.out))
    with shown_progress(options.quiet) as progress:
        card = make(
            _source(options), options.out, recipe, target_nats=options.target_nats,
            progress=progress,
        )  # fmt: skip
    print_card(card)
    return 1 if card.refusals else 0


def run_show(options: argparse.Namespace) -> int:
    """Handler of `kvtier memory show`. Raises MemoryFileError."""
    from kvtier.memory.storage import load_card

    card = load_card(options.memory)
    if options.format == "json":
        print(card.to_json())
    else:
        print_card(card)
    return 0


def run_verify(options: argparse.Namespace) -> int:
    """Handler of `kvtier memory verify`. Raises KvtierError; returns 0, and 1 where the card says
    something else."""
    from kvtier.memory.making import verify
    from kvtier.memory.storage import load_card

    card = load_card(options.memory)
    with shown_progress(options.quiet) as progress:
        found = verify(_source(options), options.memory, progress)
    differ = False
    for kind, rows in found.items():
        for row, before in zip(rows, card.rows[kind], strict=True):
            same = abs(row.nll_gap - before.nll_gap) < SAME and abs(row.kl - before.kl) < SAME
            differ = differ or not same
            said = "as its card says" if same else f"its card says {before.nll_gap:.3f}"
            print(f"{kind}, {row.way}: {row.nll_gap:.3f} nats lost per token, {said}")
    return 1 if differ else 0


def print_card(card: Card) -> None:
    """A card as a person reads it."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    identity = card.identity
    console.print(
        f"prefix memory {card.digest[:16]}: {identity.prefix_tokens} tokens for {identity.model} "
        f"({identity.dtype}), of {sum(card.traces.values())} traces"
    )
    for kind, rows in card.rows.items():
        table = Table(title=f"{kind} ({rows[0].requests})", title_justify="left")
        table.add_column("held of the prefix")
        for name in ("nats lost", "KL", "right", "KiB held", "KiB read", "fell back", "requeued"):
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(
                row.way, f"{row.nll_gap:.3f}", f"{row.kl:.3f}", f"{row.right:.2f}",
                f"{row.bytes_held / 1024:.0f}", f"{row.bytes_read / 1024:.0f}",
                f"{row.fell_back:.0%}", f"{row.requeued:.0%}",
            )  # fmt: skip
        console.print(table)
    console.print(
        f"a prompt more than {card.requeue_above:.0%} of whose lookups fall back is read with the "
        f"exact prefix; positions up to {card.positions} behind the prefix were seen"
    )
    alone = "the smallest is one query's alone, which can be read back from it"
    console.print(
        f"entries stand for {card.least_members} queries or more"
        + (f": {alone}" if card.least_members == 1 else "")
    )
    for reason in card.refusals:
        console.print(f"must not be served: {reason}")


def _source(options: argparse.Namespace) -> Source:
    from kvtier.memory.making import Source

    prefix = read_text(options.prefix_file, "--prefix-file")
    if options.seed < 0:
        raise UsageError("--seed", "at least 0", options.seed)
    return Source(located(options.model_path), prefix, options.traces, options.chat, options.seed)


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
    from kvtier.memory.published import publish

    with configured_store() as store:
        key, change = publish(store, options.memory, options.name, options.location)
    columns = ("published", "change")
    print_rows([{"published": str(key), "change": change}], columns, options.format)
    return 0


def run_list(options: argparse.Namespace) -> int:
    """Handler of `kvtier memory list`. Raises StoreError."""
    from kvtier.memory.published import memory_keys

    with configured_store() as store:
        found = rows_of(store, memory_keys(store))
    rows = [_row(row, document) for row, document in found]
    print_rows(rows, COLUMNS, options.format)
    return 0


def run_withdraw(options: argparse.Namespace) -> int:
    """Handler of `kvtier memory withdraw`. Raises UsageError and StoreError."""
    from kvtier.memory.published import withdraw

    with configured_store() as store:
        key = withdraw(store, options.name)
    print_rows([{"withdrawn": str(key)}], ("withdrawn",), options.format)
    return 0


def _row(row: dict[str, Any], document: Document | None) -> dict[str, Any]:
    """A row of the calibration store with what one wants to know of a memory. digest: as servers
    say it."""

    known = document if isinstance(document, MemoryDocument) else None
    return {
        "name": parse_key(row["key"]).name,
        **row,
        "prefix": known and known.prefix_tokens,
        "dtype": known and known.dtype,
        "digest": known and known.digest[:16],
        "location": known and known.location,
    }
