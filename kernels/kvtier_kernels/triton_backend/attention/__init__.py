"""Attention over entries by slot, over lists in pages, and over long prefixes by a library."""
