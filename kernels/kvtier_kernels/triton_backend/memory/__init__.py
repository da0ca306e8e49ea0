"""Fixed prefixes: which entry of a memory answers a token, and the states over prefixes."""
