"""The entries that NVIDIA kvpress's presses keep of contexts, from an environment of its own.

contexts.jsonl ── kvpress_masks.py ──> NAME.npz, one after another
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvtier.errors import UsageError

SCRIPT = Path(__file__).resolve().parents[1] / "peers" / "kvpress_masks.py"


def press(
    python: Path, model_path: Path, folder: Path, contexts: Mapping[str, Sequence[int]],
    shares: Sequence[float], names: Sequence[str] | None,
) -> None:  # fmt: skip
    """Have presses say what they keep of contexts, a file in `folder` for each that has none yet.
    names: the presses to run, by their names in kvpress_masks.py; None runs all of them.

    Raises UsageError when the other environment cannot make them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file, log = folder / "contexts.jsonl", folder / "log"
    lines = [json.dumps({"name": name, "ids": list(ids)}) for name, ids in contexts.items()]
    file.write_text("\n".join(lines) + "\n")
    command = [
        *(str(python), str(SCRIPT), str(file), str(folder), "--model", str(model_path.resolve())),
        *("--shares", ",".join(map(str, shares))),
        *(("--presses", *names) if names else ()),
    ]
    with log.open("ab") as said:
        code = subprocess.run(command, stdout=said, stderr=said, check=False).returncode
    if code:
        expected = f"a Python that has kvpress and the presses asked for; {log} says more"
        raise UsageError("--kvpress-python", expected, f"exit {code}")


def read_masks(file: Path, shape: tuple[int, ...]) -> dict[tuple[str, float], Tensor]:
    """Return the masks of a context, bool `[layers, kv_heads, tokens]`, by press and share of the
    bytes."""
    found = {}
    for key, packed in np.load(file).items():
        press_name, _, share = key.rpartition(" ")
        bits = np.unpackbits(packed, count=int(np.prod(shape))).astype(bool).reshape(shape)
        found[press_name, float(share)] = torch.from_numpy(bits)
    return found
