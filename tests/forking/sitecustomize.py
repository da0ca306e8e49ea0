"""Python imports this first in all processes that tests start: tests/conftest.py sets PYTHONPATH."""

import os

# Where a test wants a server exactly as users start it.
if "TESTS_SPAWN" not in os.environ:
    import fork_instead_of_spawn  # noqa: F401
