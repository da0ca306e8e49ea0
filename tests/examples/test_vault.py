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
    told, found, opened = story.manual, story.questions[0], []
    while found != vault.EMPTY:
        told += " " + found
        name = " ".join(found.split()[-2:])
        codes = " ".join(told[told.index(name) :].split()[2:10])
        opened.append(name)
        found = story.vaults.open(name, codes)
    assert opened == [" ".join(question.split()[-2:]) for question in story.questions]
    assert opened == list(story.vaults.codes)


def test_codes_of_notes_are_nowhere_in_the_manual(vault: ModuleType):
    story = vault.write_story(7, 1000)
    codes = list(story.vaults.codes.values())
    assert [c in story.manual for c in codes] == [True, True, True, False, False]
    noted = [c in text for c, text in zip(codes[3:], story.vaults.contents.values(), strict=False)]
    assert noted == [True, True]


@pytest.mark.parametrize("name", ["", "no such", "{name}"])
def test_a_wrong_tool_call_is_refused(vault: ModuleType, name: str):
    story = vault.write_story(7, 1000)
    known = next(iter(story.vaults.codes))
    with pytest.raises(vault.WrongCodeError):
        story.vaults.open(name.format(name=known), "k00 k00")
