"""The world of the examples, without a server."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def vault(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("vault", EXAMPLES / "vault.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "vault", module)
    spec.loader.exec_module(module)
    return module


def test_a_perfect_reader_opens_every_vault(vault: ModuleType):
    story = vault.write_story(7, 1000)
    told, note = story.manual, ""
    for question in story.questions:
        told += " " + vault.user_turn(note, question)
        name = " ".join(question.split()[-2:])
        at = told.index(name)
        note = story.vaults.open(" ".join(told[at:].split()[:10]))
    assert note == ""
    assert len(story.vaults.notes) == 2


def test_notes_are_nowhere_in_the_manual(vault: ModuleType):
    story = vault.write_story(7, 1000)
    for note in story.vaults.notes.values():
        assert " ".join(note.split()[:2]) not in story.manual


@pytest.mark.parametrize("call", ["", "amber", "no such k01 k02", "{name} k00 k00"])
def test_a_wrong_tool_call_is_refused(vault: ModuleType, call: str):
    story = vault.write_story(7, 1000)
    name = next(iter(story.vaults.codes))
    with pytest.raises(vault.WrongCodeError):
        story.vaults.open(call.format(name=name))
