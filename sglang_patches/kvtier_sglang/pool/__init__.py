"""Head-split KV: two slot spaces, one per head class."""
