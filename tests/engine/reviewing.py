"""Comparing what SGLang has with what of it was looked at."""

from __future__ import annotations

from collections.abc import Set

from kvtier_sglang.versions import TESTED, sglang_version


def unreviewed(found: Set[str], known: Set[str]) -> Set[str]:
    """Names that SGLang has and nobody looked at; of the newest version that is tested also those
    that are gone. An older one need not have them yet."""
    return found ^ known if sglang_version() >= max(TESTED) else found - known
