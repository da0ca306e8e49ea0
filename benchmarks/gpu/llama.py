"""Attention of Llama-3.1-8B, whose shape everything has that is measured without a model."""

from __future__ import annotations

KV_HEADS, GROUP, DIM, LAYERS = 8, 4, 128, 32
SCALE = DIM**-0.5
# The entries of a locality head: sink, recent tokens and the compensation entry.
SINK_TOKENS = 4
LOCALITY_ENTRIES = SINK_TOKENS + 1024 + 1
