"""Recorded sessions of agents become contexts that go on as they were recorded."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from text_models import CHATML, write_llama, write_tokenizer

from benchmarks.real import table
from benchmarks.real.samples import MOST_QUESTIONS, TRANSCRIPTS, elided, of_transcripts
from kvtier.errors import UsageError
from kvtier.synthetic.tokenizer import Tokenizer

CALL = {"function": {"name": "get_user", "arguments": '{"id": "mia"}'}, "id": "1", "type": "x"}


def session(turns: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief. " * 20}]
    for turn in range(turns):
        messages += [
            {"role": "user", "content": f"What is known of traveller {turn}?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": f"A seat in row {turn}.", "tool_call_id": "1"},
            {"role": "assistant", "content": f"The seat is in row {turn}."},
        ]
    return messages


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(str(write_tokenizer(tmp_path_factory.mktemp("words"), template=CHATML)))


def written(folder: Path, transcripts: Any) -> Path:
    file = folder / "transcripts.json"
    file.write_text(json.dumps(transcripts))
    return file


def test_context_prompt_and_answer_are_the_transcript_as_it_was(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    length, messages = 400, session(20)
    (sample,) = of_transcripts(written(tmp_path, [{"messages": messages}]), tokenizer, length, 1)
    assert len(sample.context_ids) == length
    assert len(sample.questions) == MOST_QUESTIONS
    chat = [
        {
            "role": one["role"],
            "content": one["content"]
            or '<tool_call>{"name": "get_user", "arguments": {"id": "mia"}}</tool_call>',
        }
        for one in messages
    ]
    whole = tokenizer.encode(tokenizer.render_chat(chat))
    for question in sample.questions:
        ids = [*sample.context_ids, *question.prompt_ids, *question.answer_ids]
        assert ids == whole[: len(ids)]
    said = [tokenizer.decode(question.answer_ids) for question in sample.questions]
    assert said[0].startswith(("<tool_call>", "The seat is in row"))
    assert len(set(said)) > 1


def test_what_is_taken_out_of_a_context_stood_at_its_places(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (sample,) = of_transcripts(written(tmp_path, [session(20)]), tokenizer, 400, 1)
    shorter, taken = elided(sample, (0.25, 0.5), 50)
    whole, rest = list(sample.context_ids), list(shorter.context_ids)
    assert len(rest) == 300
    assert shorter.questions == sample.questions
    assert [*rest[:75], *taken[:50], *rest[75:150], *taken[50:], *rest[150:]] == whole


def test_transcripts_that_end_before_are_passed_over(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = written(tmp_path, [session(1), {"traj": session(20)}, session(30)])
    assert len(of_transcripts(file, tokenizer, 400, 2)) == 2
    with pytest.raises(UsageError, match="3 transcripts that go on behind 400 tokens"):
        of_transcripts(file, tokenizer, 400, 3)
    silent = Tokenizer(str(write_tokenizer(tmp_path)))
    with pytest.raises(UsageError, match="a model with a chat template"):
        of_transcripts(file, silent, 400, 1)


def test_the_table_measures_on_transcripts(tmp_path: Path) -> None:
    file = tmp_path / "recorded.json.gz"
    file.write_bytes(gzip.compress(json.dumps([session(20), session(25)]).encode()))
    arguments = [
        *("--model-path", str(write_llama(tmp_path / "model")), "--lens", "600"),
        *("--shares", "0.5", "--contexts", "2", "--choose-len", "600", "--choose-contexts", "1"),
        *("--fit-contexts", "2", "--fit-lens", "600", "--curve-lens", "600"),
        *("--fit-tasks", "quotation", "--state", str(tmp_path / "state")),
        *("--settings", "adaptive budgets", "adaptive budgets, 5 turns + refresh"),
        *("--transcripts", str(file)),
    ]
    out = tmp_path / "table.json"
    assert table.main([*arguments, "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    assert document["settings"]["transcripts"] == "recorded.json.gz"
    found = {row["way"]: row for row in document["kept"]}
    assert set(found["adaptive budgets"]["tasks"]) == {TRANSCRIPTS}
    assert found["adaptive budgets, 5 turns + refresh"]["bytes"] > 0
    assert table.main([*arguments, "--tasks", "qa", "--out", str(out)]) == 2
