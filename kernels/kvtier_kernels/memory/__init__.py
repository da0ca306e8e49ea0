"""Prefix memories: what stands for a fixed prefix that requests begin with (base.py), looked up and
attended to by a backend's kernels."""
