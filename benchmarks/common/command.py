"""What every benchmark's command does with its outcome and its failures, and where they live."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier.errors import KvtierError, UsageError

ROOT = Path(__file__).resolve().parents[2]


def run_command(
    name: str, options: argparse.Namespace, run: Callable[[argparse.Namespace], dict[str, Any]]
) -> int:
    """Run a benchmark and write what it returns to `options.out`, as JSON.

    Returns 0, and 2 for bad input or 1 for what failed, which is said under the benchmark's name;
    1 also where the outcome has a list of `bars` and one of them is not met.
    """
    try:
        document = run(options)
    except UsageError as error:
        print(f"benchmarks.{name}: error: {error}", file=sys.stderr)
        return 2
    except (KvtierError, subprocess.CalledProcessError) as error:
        print(f"benchmarks.{name}: {error}", file=sys.stderr)
        return 1
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    bars = document.get("bars")
    return 0 if not isinstance(bars, list) or all(bar["met"] for bar in bars) else 1


__all__ = ["ROOT", "run_command"]
