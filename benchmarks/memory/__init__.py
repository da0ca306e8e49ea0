"""Prefix memories, measured on a real, small model."""
