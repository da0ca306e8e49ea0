"""SGLang pins what its LoRA layers copy to a GPU, which wants a driver; here nothing is copied.

Python imports this first in every process that has this folder on its path.
"""

import contextlib
import functools
import os

import torch

# In processes that tests start; those of the soak alone are as users' are.
with contextlib.suppress(ImportError):
    import fork_instead_of_spawn  # noqa: F401

    if "COVERAGE_PROCESS_START" in os.environ:
        import periodic_coverage  # noqa: F401


def unpinned(make):
    @functools.wraps(make)
    def made(*args, pin_memory=False, **kwargs):
        return make(*args, **kwargs)

    return made


for name in ("arange", "empty", "full", "ones", "tensor", "zeros"):
    setattr(torch, name, unpinned(getattr(torch, name)))
torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
