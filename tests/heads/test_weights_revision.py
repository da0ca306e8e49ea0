"""The digest of a model's weights: read once, and again when a file has changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier.heads.model import config
from kvtier.heads.model.config import weights_revision


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of the files of each time that weights were read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    times: list[list[str]] = []
    digest = config._digest

    def counted(files):
        times.append([file.name for file in files])
        return digest(files)

    monkeypatch.setattr(config, "_digest", counted)
    return times


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.safetensors").write_bytes(name.encode() * 1000)
    return str(folder)


def test_weights_are_read_once_until_a_file_changes(tmp_path, model, read):
    first = weights_revision(model)
    assert first is not None
    assert weights_revision(model) == first
    (tmp_path / "link").symlink_to(model)
    assert weights_revision(str(tmp_path / "link")) == first
    assert read == [["a.safetensors", "b.safetensors"]]
    file = Path(model) / "a.safetensors"
    held = file.stat()
    file.write_bytes(b"c" * 1000)
    os.utime(file, ns=(held.st_atime_ns, held.st_mtime_ns + 1))
    assert weights_revision(model) != first
    file.unlink()
    weights_revision(model)
    assert len(read) == 3


@pytest.mark.parametrize("content", ["", "[]", '{"files": 3, "revision": 1}', "\0"])
def test_what_is_remembered_may_be_damaged(tmp_path, model, read, content):
    first = weights_revision(model)
    (memory,) = (tmp_path / "cache" / "kvtier" / "weights").iterdir()
    memory.write_text(content)
    assert weights_revision(model) == first
    assert len(read) == 2


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path, model, read):
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert weights_revision(model) == weights_revision(model) is not None
    assert len(read) == 2
    assert weights_revision(str(tmp_path)) is None, "without weights there is none"
