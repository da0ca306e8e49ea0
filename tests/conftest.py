"""Shared fixtures. Threads are capped because oversubscribed CPU kernels are far slower."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "2")
# Nothing in the tests may reach out for models.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
