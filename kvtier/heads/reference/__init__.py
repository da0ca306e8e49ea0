"""The reference implementation of retention, which the engine's tokens are compared with."""
