"""Any model: one small run of a workload in English on the real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from text_models import write_llama
from waiting import SAFETY_S

from kvtier.bench.schema import Document, RequestRecord
from kvtier.bench.workload import open_script, plan_sessions


@pytest.mark.engine
def test_a_model_directory_is_benched_from_end_to_end(tmp_path: Path):
    """Every head whole, kvtier must answer and score as full KV does; with no head whole, not."""
    folder, out, page = write_llama(tmp_path / "llama"), tmp_path / "o.json", tmp_path / "o.html"
    command = [
        *(sys.executable, "-m", "kvtier.bench", "--model-path", str(folder), "--len", "1k"),
        *("--turns", "2", "--questions", "2", "--policies", "full,kvtier,window"),
        *("--json", str(out), "--report", str(page), "-q"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SAFETY_S, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = Document.model_validate_json(out.read_text())
    assert document.workload.script == "text"
    full, kvtier, window = document.runs
    for run in document.runs:
        assert [turn.turn for turn in run.turns] == [1, 2]
        assert run.turns[1].cached_tokens >= 1024
        assert [turn.scored_questions for turn in run.turns] == [2, 2]
        assert [turn.nll_questions for turn in run.turns] == [1, 2]
        # Prompts are those that the seed and the answers lead to.
        for prompt, _, request in conversation(folder, document, run.requests):
            assert len(prompt) == request.prompt_tokens
    assert [r.output_ids for r in kvtier.requests] == [r.output_ids for r in full.requests]
    found = {run.policy: [r.nll for r in run.requests[1:]] for run in document.runs}
    assert found["kvtier"] == pytest.approx(found["full"], abs=1e-4)
    assert found["full"] == pytest.approx(teacher_forced(folder, document, full.requests), abs=1e-3)
    assert window.summary.nll != pytest.approx(full.summary.nll, abs=1e-3)
    assert window.turns[1].kv_device_bytes < full.turns[1].kv_device_bytes
    table = " ".join(done.stdout.split())
    for said in ("text: 1 session of 2 turns, 1k context", "TTFT ms", "NLL", "heads save nothing"):
        assert said in table
    assert json.loads(out.read_text())["notes"] == list(document.notes) != []
    assert "NLL of right answers" in page.read_text()


def conversation(
    folder: Path, document: Document, requests: Sequence[RequestRecord]
) -> Iterator[tuple[list[int], Sequence[int], RequestRecord]]:
    """(prompt, right answer, request) of every request, from the seed and what was answered."""
    script = open_script("text", str(folder))
    (session,) = plan_sessions(document.workload, script)
    history = list(session.context_ids)
    for turn, (own, branches) in enumerate(zip(session.turns, session.branches, strict=True)):
        asked = [request for request in requests if request.turn == turn + 1]
        yield [*history, *own.prompt_ids], own.answer_ids, asked[0]
        history += [*own.prompt_ids, *asked[0].output_ids]
        if asked[0].output_ids[-1] not in script.stop_ids:
            history += script.closing_ids
        for question, request in zip(branches, asked[1:], strict=True):
            yield [*history, *question.prompt_ids], question.answer_ids, request


def teacher_forced(
    folder: Path, document: Document, requests: Sequence[RequestRecord]
) -> list[float]:
    """NLL of the right answers by transformers, all but the first question's."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt, right, _ in list(conversation(folder, document, requests))[1:]:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *right]])).logits[0, len(prompt) - 1 : -1]
        picked = logits.log_softmax(-1).gather(1, torch.tensor(right)[:, None])
        found.append(-float(picked.mean()))
    return found
