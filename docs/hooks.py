"""What mkdocs fills into the pages from the program itself, so that it is never out of date.

<!-- settings -->    every setting, with its default and what it is for
<!-- scorers -->     every token scorer of the registry, with its paper
<!-- stores -->      every store of the tier, with its flags
"""

from __future__ import annotations

import importlib
from typing import Any

from kvtier.config import Settings
from kvtier.retention.scorers import SCORERS
from kvtier_tierd.stores.registry import STORES


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this for every page."""
    tables = (("settings", settings_table), ("scorers", scorers_table), ("stores", stores_table))
    for name, table in tables:
        mark = f"<!-- {name} -->"
        if mark in markdown:
            markdown = markdown.replace(mark, table())
    return markdown


def settings_table() -> str:
    lines = ["| flag | default | what it is |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = (
            "" if field.default is None else f"`{field.get_default(call_default_factory=True)}`"
        )
        flag = "--" + name.replace("_", "-")
        lines.append(f"| `{flag}` | {_cell(default)} | {_cell(field.description or '')} |")
    return "\n".join(lines)


def scorers_table() -> str:
    lines = ["| `--scorer` | what stays | numbers kept per token and head |", "|---|---|---|"]
    for name, scorer in SCORERS.items():
        text = _first_paragraph(scorer.__module__)
        lines.append(f"| `{name}` | {_cell(text)} | {scorer.state_width} |")
    return "\n".join(lines)


def stores_table() -> str:
    lines = ["| `--store` | what it is | its flags |", "|---|---|---|"]
    for name, store in STORES.items():
        # Behind "The store `name`: ".
        text = _first_paragraph(store.__module__).partition(": ")[2]
        flags = ", ".join(f"`{flag.name}`" for flag in store.options_type.flags().values())
        lines.append(f"| `{name}` | {_cell(text)} | {flags} |")
    return "\n".join(lines)


def _first_paragraph(module: str) -> str:
    text = importlib.import_module(module).__doc__ or ""
    return text.split("\n\n", maxsplit=1)[0].replace("\n", " ")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
