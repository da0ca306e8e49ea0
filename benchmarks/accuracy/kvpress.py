"""kvpress over given contexts, from an environment of its own (benchmarks/peers/README.md)."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.benchmark import ROOT
from benchmarks.common.recall_contexts import RecallContext, save_contexts
from kvtier.errors import UsageError
from kvtier.synthetic.recall import DEFAULT_LANGUAGE

PEERS = ROOT / "benchmarks" / "peers"
PEER_PYTHON = PEERS / ".venv" / "bin" / "python"


def run_kvpress(
    contexts: Sequence[RecallContext],
    model: Path,
    shares: Sequence[float],
    *,
    python: Path = PEER_PYTHON,
    draws: int = 1,
    methods: Sequence[str] = (),
) -> dict[str, Any]:
    """Run run_kvpress.py and return what it writes. shares: of the KV bytes kept; draws: of random
    presses; methods: by their names in METHODS, none named: all of them.

    Raises UsageError where there is no such Python, and CalledProcessError.
    """
    if not python.is_file():
        expected = "a Python with kvpress; benchmarks/peers/README.md says how to make one"
        raise UsageError("--peer-python", expected, str(python))
    with tempfile.TemporaryDirectory(prefix="kvtier-kvpress-") as folder:
        asked, answered = Path(folder, "contexts.json"), Path(folder, "records.json")
        save_contexts(asked, contexts, DEFAULT_LANGUAGE.eot)
        command = [
            *(str(python), str(PEERS / "run_kvpress.py"), str(asked), str(answered)),
            *("--model", str(model), "--seeds", str(draws)),
            *("--shares", ",".join(map(str, shares))),
            *(("--methods", *methods) if methods else ()),
        ]
        subprocess.run(command, check=True, stdout=sys.stderr)
        found: dict[str, Any] = json.loads(answered.read_text())
    return found


__all__ = ["PEER_PYTHON", "run_kvpress"]
