"""Head methods: which KV heads need the whole context. One file each, and the registry.

`kvtier calibrate heads --method NAME` runs one.
"""

from __future__ import annotations

from typing import Any

from kvtier.errors import UsageError
from kvtier.heads.methods.base import HeadMethod, HeadScores, Target
from kvtier.heads.methods.contextkeeper import ContextKeeper
from kvtier.heads.methods.razor import Razor
from kvtier.heads.methods.taylor import Taylor

METHODS: dict[str, type[HeadMethod]] = {
    method.name: method
    for method in (
        ContextKeeper,
        Razor,
        Taylor,
    )
}
DEFAULT_METHOD = Taylor.name


def make_method(name: str, **parameters: Any) -> HeadMethod:
    """The method called `name`. Raises UsageError that lists the valid names."""
    method = METHODS.get(name)
    if method is None:
        raise UsageError("--method", f"one of {', '.join(sorted(METHODS))}", name)
    return method(**parameters)


__all__ = [
    "DEFAULT_METHOD",
    "METHODS",
    "HeadMethod",
    "HeadScores",
    "Target",
    "make_method",
]
