"""What mkdocs fills into the pages from the program itself, so that it is never out of date.

<!-- settings -->    every setting, with its default and what it is for
<!-- scorers -->     every token scorer of the registry, with its paper
"""

from __future__ import annotations

import importlib
from typing import Any

from kvtier.config import Settings
from kvtier.retention.scorers import SCORERS


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this for every page."""
    for name, table in (("settings", settings_table), ("scorers", scorers_table)):
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
        module = importlib.import_module(scorer.__module__)
        paragraph = (module.__doc__ or "").split("\n\n", maxsplit=1)[0].replace("\n", " ")
        lines.append(f"| `{name}` | {_cell(paragraph)} | {scorer.state_width} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
