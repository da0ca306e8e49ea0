"""The parts of pages that mkdocs fills in from the program itself, so that they are never out of
date.

<!-- settings -->      every setting by section, with its flag, default and what it is for
<!-- scorers -->       every token scorer of the registry, with its paper
<!-- share rules -->   every share rule of the registry, with the number that it takes
<!-- head methods -->  every head method of the registry, with its paper
<!-- stores -->        every store of the tier, with its flags
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier.config import SECTIONS, SETTINGS, Setting
from kvtier.heads.methods import METHODS
from kvtier.retention.scorers import SCORERS
from kvtier.retention.shares import SHARE_RULES
from kvtier_tierd.stores.registry import STORES


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this for every page."""
    for name, table in _TABLES.items():
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
    value = str(field.get_default(call_default_factory=True)).replace(str(Path.home()), "~", 1)
    default = "" if field.default is None else f"`{value}`"
    flags = " or ".join(f"`{flag}`" for flag in setting.flags)
    cells = (f"`{setting.key}`", flags, _cell(default), _cell(field.description or ""))
    return f"| {' | '.join(cells)} |"


def scorers_table() -> str:
    lines = ["| `--scorer` | what stays | numbers kept per token and head |", "|---|---|---|"]
    for name, scorer in SCORERS.items():
        lines.append(f"| `{name}` | {_about(scorer, SCORERS)} | {scorer.state_width} |")
    return "\n".join(lines)


def share_rules_table() -> str:
    lines = ["| `--share-rule` | how much stays | its number |", "|---|---|---|"]
    for name, rule in SHARE_RULES.items():
        lines.append(f"| `{name}` | {_about(rule, SHARE_RULES)} | {rule.takes.value} |")
    return "\n".join(lines)


def head_methods_table() -> str:
    lines = ["| `--method` | which heads | needs samples |", "|---|---|---|"]
    for name, method in METHODS.items():
        needs = "for a budget" if method.data_free else "yes"
        lines.append(f"| `{name}` | {_about(method, METHODS)} | {needs} |")
    return "\n".join(lines)


def stores_table() -> str:
    lines = ["| `--store` | what it is | its flags |", "|---|---|---|"]
    for name, store in STORES.items():
        # The text stands behind "The store `name`: ".
        about = _about(store, STORES).partition(": ")[2]
        flags = ", ".join(f"`{flag.name}`" for flag in store.options_type.flags().values())
        lines.append(f"| `{name}` | {about} | {flags} |")
    return "\n".join(lines)


_TABLES = {
    "settings": settings_tables,
    "scorers": scorers_table,
    "share rules": share_rules_table,
    "head methods": head_methods_table,
    "stores": stores_table,
}


def _about(kind: type, registry: Mapping[str, type]) -> str:
    """The first paragraph of the module that a class is from; of the class, where several of the
    registry are from one module."""
    same = [one for one in registry.values() if one.__module__ == kind.__module__]
    about = kind if len(same) > 1 else importlib.import_module(kind.__module__)
    return _cell((inspect.getdoc(about) or "").split("\n\n", maxsplit=1)[0].replace("\n", " "))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
