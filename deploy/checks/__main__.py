"""`python -m deploy.checks`: 0 where nothing is found, 1 where something is, 2 for bad input."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.checks import CHECKS, findings
from deploy.checks.manifests import Manifests
from deploy.checks.rendering import render
from kvtier.errors import UsageError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.checks")
    parser.add_argument("what", nargs="+", help="folders of overlays, rendered files, or - (stdin)")
    parser.add_argument(
        "--skip", action="append", default=[], choices=CHECKS, help="a check to leave out; repeat"
    )
    options = parser.parse_args(argv)
    checks = [name for name in CHECKS if name not in options.skip]
    wrong = 0
    try:
        for what in options.what:
            found = findings(_read(what), checks)
            for one in found:
                print(f"{what}: {one}")
            print(f"{what}: {len(found)} findings of {len(checks)} checks")
            wrong += len(found)
    except UsageError as error:
        print(f"deploy.checks: error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        told = f"{error.name} is not installed; pip install '.[dev]' and smg, or --skip a check"
        print(f"deploy.checks: error: {told}", file=sys.stderr)
        return 2
    return 1 if wrong else 0


def _read(what: str) -> Manifests:
    if what == "-":
        return Manifests.parse(sys.stdin.read())
    path = Path(what)
    return render(path) if path.is_dir() else Manifests.parse(path.read_text())


if __name__ == "__main__":
    sys.exit(main())
