"""Shared fixtures. Threads are capped because oversubscribed CPU kernels are far slower."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "2")
# Nothing in the tests may reach out for models.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

if not torch.cuda.is_available():
    # Triton decides when it is imported. Without a GPU its kernels are tested in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")
