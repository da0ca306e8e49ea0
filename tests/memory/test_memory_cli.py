"""`kvtier memory`: what cannot be built from is named, and what a card says is what is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from text_models import write_llama

from kvtier.cli import main

PREFIX = "Letters are put into boxes, by their first word. " * 8


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def arguments(tmp_path, model_path) -> list[str]:
    (tmp_path / "prefix.txt").write_text(PREFIX)
    traces = [
        {"prompt": f"\nLetter {n}? ", "answer": f"Box {n % 3}.", "group": f"{n % 8}"}
        for n in range(24)
    ]
    (tmp_path / "traces.jsonl").write_text("\n".join(map(json.dumps, traces)))
    return [
        *("--model-path", str(model_path), "--prefix-file", str(tmp_path / "prefix.txt")),
        *("--traces", str(tmp_path / "traces.jsonl"), "-q"),
    ]


def build(arguments: list[str], folder: Path, *more: str) -> int:
    return main(["memory", "build", *arguments, "--out", str(folder), *more])


def test_a_card_says_what_was_measured_and_why_it_is_not_served(tmp_path, arguments, capsys):
    folder = tmp_path / "memory"
    small = ("--entries", "20", "--key-width", "8", "--kept-share", "0.1", "--state-heads", "0.5")
    code = build(arguments, folder, *small, "--target-nats", "0")
    printed = capsys.readouterr().out
    assert "entries stand for" in printed
    card = json.loads((folder / "memory.json").read_text())
    assert code == bool(card["refusals"])
    rows = {row["way"]: row for row in card["rows"]["held-out requests"]}
    assert rows["exact"]["nll_gap"] == 0
    ungated = rows["memory without its gate"]
    assert ungated["bytes_read"] < ungated["bytes_held"] == rows["memory"]["bytes_held"]
    # The requests that began again read the exact prefix.
    again = rows["memory"]["requeued"]
    assert rows["memory"]["bytes_read"] >= again * rows["exact"]["bytes_read"]
    assert rows["kept KV, as many bytes"]["bytes_held"] <= rows["memory"]["bytes_held"]
    assert 0 <= rows["memory"]["fell_back"] <= 1
    assert [row["way"] for row in card["rows"]["smaller memories"][1:]] == [
        "0.25 of it",
        "0.5 of it",
    ]
    assert sum(card["traces"].values()) == 24
    assert card["build_seconds"] > 0
    for reason in card["refusals"]:
        assert "must not be served: " in printed
        assert reason.split(",")[0][:30] in printed
    assert main(["memory", "show", str(folder), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == card
    assert main(["memory", "verify", str(folder), *arguments]) == 0
    assert "as its card says" in capsys.readouterr().out


def test_a_card_that_says_something_else_is_told(tmp_path, arguments, capsys):
    folder = tmp_path / "memory"
    build(arguments, folder, "--entries", "10", "--kept-share", "0.3")
    card = json.loads((folder / "memory.json").read_text())
    for row in card["rows"]["held-out requests"]:
        row["nll_gap"] += 0.5
    (folder / "memory.json").write_text(json.dumps(card))
    capsys.readouterr()
    assert main(["memory", "verify", str(folder), *arguments]) == 1
    assert "its card says" in capsys.readouterr().out
    (tmp_path / "prefix.txt").write_text("Numbers are put into boxes. " * 8)
    assert main(["memory", "verify", str(folder), *arguments]) == 2
    assert "prefix" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--prefix-file", "nowhere.txt"), "--prefix-file: expected a readable file"),
        (("--traces", "nowhere.jsonl"), "--traces: expected a readable file"),
        (("--model-path", "nowhere"), "--model-path: expected"),
        (("--target-nats", "-1"), "--target-nats: expected at least 0"),
        (("--seed", "-1"), "--seed: expected at least 0"),
    ],
)
def test_what_cannot_be_built_from_is_named(tmp_path, arguments, capsys, more, said):
    assert build(arguments, tmp_path / "memory", *more) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "memory").exists()


def test_traces_without_answers_and_a_file_in_the_way_are_refused(tmp_path, arguments, capsys):
    (tmp_path / "traces.jsonl").write_text('{"prompt": "\\na"}\n{"prompt": "\\nb"}')
    (tmp_path / "taken").touch()
    for out, said in (
        ("memory", "an answer in every trace"),
        ("taken", "--out: expected a directory"),
    ):
        assert build(arguments, tmp_path / out) == 2
        assert said in capsys.readouterr().err
