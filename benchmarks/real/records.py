"""The measurements of a long benchmark, on disk: a run that is cut off goes on where it was.

STATE/settings.json      the settings of every record; others are refused
STATE/records.jsonl      one measurement per line
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier.errors import UsageError

Key = tuple[str | int | float, ...]


class Records:
    """Measurements by key. Several processes may add to one directory; each sees its own and those
    that were there when it began."""

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        """Open a directory, or make it. Raises UsageError when it holds measurements under other
        settings."""
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._file = directory / "records.jsonl"
        _check_settings(directory / "settings.json", json.loads(json.dumps(settings)))
        self._found: dict[Key, dict[str, float]] = {}
        if self._file.exists():
            self._read()

    def _read(self) -> None:
        """Read the records on disk, and drop a last line in whose middle the run was cut off."""
        whole, _, cut_off = self._file.read_text().rpartition("\n")
        if cut_off:
            self._file.write_text(f"{whole}\n" if whole else "")
        for line in whole.splitlines():
            record = json.loads(line)
            self._found[tuple(record["key"])] = record["found"]

    def __contains__(self, key: Key) -> bool:
        return key in self._found

    def __getitem__(self, key: Key) -> dict[str, float]:
        return self._found[key]

    def names(self, length: int, share: float) -> list[str]:
        """Return the names in keys (length, context, name, share) of the records, as they came."""
        found = (
            key[2] for key in self._found if len(key) == 4 and (key[0], key[3]) == (length, share)
        )
        return [str(name) for name in dict.fromkeys(found)]

    def add(self, key: Key, found: Mapping[str, float]) -> None:
        """Keep a measurement; it is on disk on return."""
        self._found[key] = dict(found)
        with self._file.open("a") as file:
            file.write(json.dumps({"key": key, "found": found}) + "\n")


def _check_settings(file: Path, settings: dict[str, Any]) -> None:
    if not file.exists():
        file.write_text(json.dumps(settings, indent=1) + "\n")
        return
    before = json.loads(file.read_text())
    different = sorted(
        name for name in before.keys() | settings.keys() if before.get(name) != settings.get(name)
    )
    if different:
        told = ", ".join(f"{name} {before.get(name)}" for name in different)
        raise UsageError(
            "--state", f"an empty directory, or the settings of {file.parent}: {told}",
            {name: settings.get(name) for name in different},
        )  # fmt: skip
