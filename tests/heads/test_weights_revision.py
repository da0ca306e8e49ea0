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


def model(folder: Path) -> Path:
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.safetensors").write_bytes(name.encode() * 1000)
    return folder


def test_weights_are_read_once(tmp_path, read):
    path = model(tmp_path / "model")
    first = weights_revision(str(path))
    assert first is not None
    assert weights_revision(str(path)) == first
    (tmp_path / "link").symlink_to(path)
    assert weights_revision(str(tmp_path / "link")) == first
    assert read == [["a.safetensors", "b.safetensors"]]


def test_a_changed_file_is_read_again(tmp_path, read):
    path = model(tmp_path / "model")
    first = weights_revision(str(path))
    file = path / "a.safetensors"
    held = file.stat()
    file.write_bytes(b"c" * 1000)
    os.utime(file, ns=(held.st_atime_ns, held.st_mtime_ns + 1))
    assert weights_revision(str(path)) != first
    (path / "b.safetensors").unlink()
    weights_revision(str(path))
    assert len(read) == 3


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"files": 3, "revision": 1}', "\0"])
def test_what_is_remembered_may_be_damaged(tmp_path, read, content):
    path = model(tmp_path / "model")
    first = weights_revision(str(path))
    (memory,) = (tmp_path / "cache" / "kvtier" / "weights").iterdir()
    memory.write_text(content)
    assert weights_revision(str(path)) == first
    assert len(read) == 2


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path, read):
    path = model(tmp_path / "model")
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert weights_revision(str(path)) == weights_revision(str(path))
    assert len(read) == 2


def test_without_weights_there_is_no_revision(tmp_path, read):
    assert weights_revision(str(tmp_path)) is None
    assert read == []
