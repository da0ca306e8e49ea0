"""Whether tests take the time that they like: `make test THOROUGH=1`."""

import os

THOROUGH = bool(os.environ.get("TESTS_THOROUGH"))
