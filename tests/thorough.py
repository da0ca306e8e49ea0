"""Whether tests take the time that they like: `make test THOROUGH=1`."""

import os

THOROUGH = bool(os.environ.get("TESTS_THOROUGH"))
# Whether what takes the CUDA compiler a minute is compiled, too: .ci/run wants it.
COMPILED = bool(os.environ.get("TESTS_COMPILED"))
