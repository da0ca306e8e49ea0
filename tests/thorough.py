"""The switch for tests that take the time that they like: `make test THOROUGH=1`."""

import os
from collections.abc import Iterable

THOROUGH = bool(os.environ.get("TESTS_THOROUGH"))
# The third of the files with slow tests that this run takes, 0, 1 or 2; None: all of them.
TURN = int(os.environ["TESTS_TURN"]) % 3 if os.environ.get("TESTS_TURN") and not THOROUGH else None


def turn_of(cases: Iterable[str]) -> list[str]:
    """The cases of a long list that have their turn in this run: a third, by TURN."""
    every = list(cases)
    return every if TURN is None else every[TURN::3]
