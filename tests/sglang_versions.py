"""The differences between the versions of SGLang that tests run with."""

from __future__ import annotations

from collections.abc import Set

import pytest

from kvtier_sglang.cpu_drafts import FIRST_VERSION
from kvtier_sglang.versions import TESTED, sglang_version

needs_drafts = pytest.mark.skipif(
    sglang_version() < FIRST_VERSION, reason="on a CPU drafts are refused with this SGLang"
)
# The demo model's tokenizer says by a response template which of its answers are calls.
needs_response_templates = pytest.mark.skipif(
    sglang_version() < (0, 5, 23), reason="this SGLang reads no calls by a response template"
)


def unreviewed(found: Set[str], known: Set[str]) -> Set[str]:
    """Names that SGLang has and nobody looked at; of the newest version that is tested also those
    that are gone. An older one need not have them yet."""
    return found ^ known if sglang_version() >= max(TESTED) else found - known
