"""Attention over lists of entries."""
