"""The operators that SGLang computes between attention and matrix products, fused, where its own
kernels are not.

kernels     RMSNorm, SiLU and product, rotation: one Triton kernel each
operators   their launchers, over torch tensors
plugin      SGLang's layers call them (entry point of a GPU pack: benchmarks/gpu/pack.py)
"""
