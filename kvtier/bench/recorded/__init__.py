"""Recorded traffic as the bench takes it: flags that name and scale a trace, and block ids as
tokens. `kvtier.bench.replay` is what replays it."""
