"""Homes of dropped entries, and sums over those that share a home."""
