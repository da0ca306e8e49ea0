"""The switch for tests that take the time that they like: `make test THOROUGH=1`."""

import os

THOROUGH = bool(os.environ.get("TESTS_THOROUGH"))
# This has what takes the CUDA compiler a minute compiled, too: .ci/run wants it.
COMPILED = bool(os.environ.get("TESTS_COMPILED"))
