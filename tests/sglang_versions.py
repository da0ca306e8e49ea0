"""The routes of SGLang's server, and the differences between the versions that tests run with."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

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


def routes() -> list[Any]:
    """Return all routes of SGLang's server."""
    from sglang.srt.entrypoints.http_server import app

    # FastAPI keeps what was included as one route of many.
    included = [getattr(route, "original_router", None) for route in app.routes]
    return [*app.routes, *(one for router in included if router for one in router.routes)]


def unreviewed(found: Set[str], known: Set[str]) -> Set[str]:
    """Names that SGLang has and nobody looked at; of the newest version that is tested also those
    that are gone. An older one need not have them yet."""
    return found ^ known if sglang_version() >= max(TESTED) else found - known
