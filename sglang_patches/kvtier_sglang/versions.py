"""The versions of SGLang that the plugin passes its tests with. What differs between versions asks
here.

docs/porting.md says how the plugin follows SGLang's next version.
"""

from __future__ import annotations

import re
from importlib.metadata import version

TESTED = ((0, 5, 22), (0, 5, 23))


def sglang_version() -> tuple[int, ...]:
    """Return the installed version of SGLang: major, minor and patch."""
    return tuple(int(number) for number in re.findall(r"\d+", version("sglang"))[:3])


def is_tested() -> bool:
    """Return whether the plugin has been tested with it."""
    return sglang_version() in TESTED
