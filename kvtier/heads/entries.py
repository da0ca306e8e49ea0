"""What `--method` asks for: one method, or several to compare on the same samples.

    razor                                        by --share, --budget or the method's own rule
    taylor@0.25,razor,razor@0.25                 each with the share it names, or none

Nothing here imports torch before a method is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.errors import UsageError
from kvtier.heads.methods import HeadMethod, Target, make_method

Parameters = Mapping[str, Mapping[str, Any]]
"""Method name -> keyword arguments of its class."""


@dataclass(frozen=True)
class Entry:
    """A method and how many heads it is asked for; `label` is what the user wrote."""

    label: str
    method: HeadMethod
    target: Target


def make_entry(label: str, target: Target, parameters: Parameters | None = None) -> Entry:
    """The entry written as `label`, `NAME` or `NAME@SHARE`; the share replaces `target`'s.

    Raises UsageError for an unknown name, a bad share, or a target the method cannot serve.
    """
    name, at, share = label.strip().partition("@")
    if at:
        try:
            target = Target(share=float(share), budget=target.budget)
        except ValueError as error:
            raise UsageError("--method", "NAME or NAME@SHARE, a share in (0, 1]", label) from error
    method = make_method(name, **(parameters or {}).get(name, {}))
    method.check_target(target)
    return Entry(label.strip(), method, target)


def make_entries(text: str, target: Target, parameters: Parameters | None = None) -> list[Entry]:
    """The entries of a comma-separated list. Raises UsageError, for repeated ones too."""
    entries = [make_entry(label, target, parameters) for label in text.split(",")]
    labels = [entry.label for entry in entries]
    if len(set(labels)) < len(labels):
        raise UsageError("--method", "different methods", text)
    return entries
