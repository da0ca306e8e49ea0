"""Whether tests take the time that they like: `make test THOROUGH=1`."""

import os

THOROUGH = bool(os.environ.get("TESTS_THOROUGH"))
# What CI compiles once, apart from the tests: .ci/run.
COMPILED = bool(os.environ.get("TESTS_COMPILED"))
