"""Exact KV on its way to the tier and back."""
