"""The checks of the kernels on this GPU; `benchmarks.gpu.check.__main__` is the command.

equal, decode, planning, choosing, peers, flashinfer_backend    measure, a part each
processes                                                       the suite and the engine's bench
claims, report                                                  bars, and lines of text
"""
