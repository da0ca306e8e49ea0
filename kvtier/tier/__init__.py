"""Exact KV outside of the engine: what a piece of it is called, and how its bytes are checked.

Reading order: keys (a name for every span of a context), blob (the bytes under a name).
"""
