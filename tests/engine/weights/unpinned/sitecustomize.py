"""SGLang pins what its LoRA layers copy to a GPU, which wants a driver; here nothing is copied.

Python imports this first in every process that has this folder on its path.
"""

import contextlib
import functools

# Only tests have it on their path: the soak as a benchmark starts its servers as users do.
with contextlib.suppress(ImportError):
    import started_by_tests  # noqa: F401

import torch


def unpinned(make):
    @functools.wraps(make)
    def made(*args, pin_memory=False, **kwargs):
        return make(*args, **kwargs)

    return made


for name in ("arange", "empty", "full", "ones", "tensor", "zeros"):
    setattr(torch, name, unpinned(getattr(torch, name)))
torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
