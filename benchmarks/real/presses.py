"""The entries that NVIDIA kvpress's presses keep of contexts, from an environment of its own.

contexts.jsonl ── kvpress_masks.py, in the background ──> NAME.npz, one after another
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvtier.errors import UsageError

SCRIPT = Path(__file__).resolve().parents[1] / "peers" / "kvpress_masks.py"
POLL_S = 1.0


class Presses:
    """The masks of contexts, as they come."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes] | None) -> None:
        self.folder, self._process = folder, process

    def masks(self, name: str, shape: tuple[int, ...]) -> dict[tuple[str, float], Tensor]:
        """Return the masks of a context, bool `[layers, kv_heads, tokens]`, by press and share of
        the bytes. Waits until they are there.

        Raises UsageError when the other environment cannot make them.
        """
        if self._process is None:
            return {}
        file = self.folder / f"{name}.npz"
        while not file.exists():
            code = self._process.poll()
            if code is not None and not file.exists():
                log = self.folder / "log"
                expected = f"a Python that has kvpress and the presses asked for; {log} says more"
                raise UsageError("--kvpress-python", expected, f"exit {code}")
            time.sleep(POLL_S)
        found = {}
        size = int(np.prod(shape))
        for key, packed in np.load(file).items():
            press, _, share = key.rpartition(" ")
            bits = np.unpackbits(packed, count=size).astype(bool).reshape(shape)
            found[press, float(share)] = torch.from_numpy(bits)
        return found


@contextmanager
def pressing(
    python: Path | None, model_path: Path, folder: Path, contexts: Mapping[str, Sequence[int]],
    shares: Sequence[float], names: Sequence[str] | None,
) -> Iterator[Presses]:  # fmt: skip
    """Run presses in the background for as long as the block lasts. python: None for no presses.
    names: the presses to run, by their names in kvpress_masks.py; None runs all of them."""
    if python is None:
        yield Presses(folder, None)
        return
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "contexts.jsonl"
    lines = [json.dumps({"name": name, "ids": list(ids)}) for name, ids in contexts.items()]
    file.write_text("\n".join(lines) + "\n")
    asked = ",".join(map(str, shares))
    command = [
        *(str(python), str(SCRIPT), str(file), str(folder), "--model", str(model_path.resolve())),
        *("--shares", asked),
        *(("--presses", *names) if names else ()),
    ]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield Presses(folder, process)
    finally:
        process.terminate()
        process.wait()
