"""Attention over entries by slot, and over long prefixes by a library."""
