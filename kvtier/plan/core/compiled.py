"""The decorator of functions that numba compiles here, and the folder of their machine code.

Compiling takes most of a minute, so machine code is kept between runs. To tell whether that is
still good, numba looks at the file of a function, not at those of the functions that it calls. So
the code is kept in a folder that is named for a digest of all sources of this package.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
from platformdirs import user_cache_path

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a function when it is first called; kept code is used where there is some."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(_folder())
    try:
        made: Function = numba.njit(cache=True)(function)
    except (OSError, RuntimeError):  # there is nowhere to write
        made = numba.njit(function)
    finally:
        numba.config.CACHE_DIR = before
    return made


@cache
def _folder() -> Path:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return user_cache_path("kvtier") / "plan" / digest.hexdigest()[:16]
