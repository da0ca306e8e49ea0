"""Entries chosen again with a turn's own queries."""
