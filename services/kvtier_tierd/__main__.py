"""`python -m kvtier_tierd`."""

import sys

from kvtier_tierd.cli import run

if __name__ == "__main__":
    sys.exit(run())
