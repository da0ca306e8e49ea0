"""What mkdocs fills into the pages from the program itself, so that it is never out of date.

<!-- settings -->    every setting by section, with its flag, default and what it is for
<!-- scorers -->     every token scorer of the registry, with its paper
"""

from __future__ import annotations

import importlib
from typing import Any

from kvtier.config import SECTIONS, SETTINGS, Setting
from kvtier.retention.scorers import SCORERS


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this for every page."""
    for name, table in (("settings", settings_tables), ("scorers", scorers_table)):
        mark = f"<!-- {name} -->"
        if mark in markdown:
            markdown = markdown.replace(mark, table())
    return markdown


def settings_tables() -> str:
    """A table for the settings at the top level, and one with a heading for each section."""
    parts = [_settings_table("")]
    for section, kind in SECTIONS.items():
        parts += [f"## `[{section}]`", kind.__doc__ or "", _settings_table(section)]
    return "\n\n".join(parts)


def _settings_table(section: str) -> str:
    lines = ["| key | flag | default | what it is |", "|---|---|---|---|"]
    lines += [_settings_row(setting) for setting in SETTINGS if setting.section == section]
    return "\n".join(lines)


def _settings_row(setting: Setting) -> str:
    field = setting.field
    default = "" if field.default is None else f"`{field.get_default(call_default_factory=True)}`"
    flags = " or ".join(f"`{flag}`" for flag in setting.flags)
    cells = (f"`{setting.key}`", flags, _cell(default), _cell(field.description or ""))
    return f"| {' | '.join(cells)} |"


def scorers_table() -> str:
    lines = ["| `--scorer` | what stays | numbers kept per token and head |", "|---|---|---|"]
    for name, scorer in SCORERS.items():
        module = importlib.import_module(scorer.__module__)
        paragraph = (module.__doc__ or "").split("\n\n", maxsplit=1)[0].replace("\n", " ")
        lines.append(f"| `{name}` | {_cell(paragraph)} | {scorer.state_width} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
