"""Where dropped entries go, and sums over those that share a home."""
