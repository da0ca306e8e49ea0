"""kvtier: many long multi-turn sessions on one GPU, inside SGLang.

The core package: head profiles, retention policies, configuration, the bench and the command
line. It imports neither SGLang nor any server code.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvtier")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
