"""Python imports this first in the processes that tests start: see tests/conftest.py."""

import started_by_tests  # noqa: F401
