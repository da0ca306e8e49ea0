"""Attention over ragged KV, per head class."""
