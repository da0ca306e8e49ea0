"""The compression of a context when its turn ends."""
