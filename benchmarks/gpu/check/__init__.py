"""The checks of the kernels on this GPU; `benchmarks.gpu.check.__main__` is the command.

equal, decode, choosing, peers                        measure, a part each
processes                                                       the suite
claims                                                          bars, and lines of text
"""
