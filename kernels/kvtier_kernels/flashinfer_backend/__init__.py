"""FlashInfer's attention over the pool as it lies; `kernels.py` says what it does and what it hands on."""
