"""Any model: plans of a workload in English, and one small run of it on the real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench_models import write_model
from text_models import CHATML, write_llama, write_tokenizer
from waiting import SAFETY_S

from kvtier.bench.options import parse_options
from kvtier.bench.planning import make_plans
from kvtier.bench.schema import Document, RequestRecord
from kvtier.bench.workload import longest_prompt, open_script, plan_sessions, turn_tokens
from kvtier.config import load_settings
from kvtier.errors import HeadProfileError, SizeError
from kvtier.retention.rules import scorer_of
from kvtier.retention.token_worth import TokenWorth

TIMEOUT_S = 900


def text_model(folder: Path, max_positions: int = 8192) -> Path:
    write_model(folder, tokenizer=False, vocab_size=640, max_position_embeddings=max_positions)
    return write_tokenizer(folder, template=CHATML, eos="<|im_end|>")


def workload_of(folder: Path, *flags: str):
    _, plans = make_plans(parse_options(["--len", "1k", "--model-path", str(folder), *flags]))
    return plans[0].plan.workload


def test_the_tokenizer_decides_what_is_said_unless_the_user_does(tmp_path: Path):
    english, demo = text_model(tmp_path / "english"), write_model(tmp_path / "demo")
    assert workload_of(demo).script == "recall"
    assert workload_of(english).script == "text"
    assert workload_of(english, "--workload", "recall").script == "recall"


def test_a_plan_has_room_for_the_longest_turns(tmp_path: Path):
    folder = text_model(tmp_path / "model")
    workload = workload_of(folder, "--turns", "3", "--questions", "2")
    script = open_script("text", str(folder))
    (session,) = plan_sessions(workload, script)
    exchange = script.lengths.prompt + script.lengths.answer
    assert turn_tokens(workload) == 6 * exchange
    assert longest_prompt(workload) == 1024 + 4 * exchange
    assert len(session.context_ids) == 1024


def test_a_context_that_the_model_has_no_positions_for_is_refused_by_name(tmp_path: Path):
    folder = text_model(tmp_path / "model", max_positions=1100)
    with pytest.raises(SizeError, match=r"--len: expected at most \d+ tokens.*1100 positions"):
        workload_of(folder, "--turns", "5")
    with pytest.raises(SizeError, match=r"--len: expected at least \d+ tokens"):
        workload_of(folder, "--len", "64")


def test_heads_that_compete_need_no_profile(tmp_path: Path):
    folder = text_model(tmp_path / "model")
    flags = ["--len", "1k", "--model-path", str(folder), "--retention", "0.5"]
    adaptive = ["--head-budgets", "adaptive", "--scorer", "reconstruction"]
    weights = ["--scorer-file", str(tmp_path / "worth.npz")]
    TokenWorth(torch.zeros(1, 1, 3)).save(tmp_path / "worth.npz")
    _, (full, ours) = make_plans(parse_options([*flags, *adaptive, *weights]))
    assert ours.plan.heads_compete
    assert not full.plan.heads_compete
    assert ours.plan.head_profile is None
    assert ours.plan.environment["KVTIER_HEAD_BUDGETS"] == "adaptive"
    assert ours.notes == (), "heads that compete save what they do not keep"
    assert "KVTIER_HEAD_PROFILE" not in ours.plan.environment
    # A number beside the KV.
    assert ours.slot_bytes > full.slot_bytes
    with pytest.raises(HeadProfileError, match="--head-budgets: expected equal beside policy ran"):
        make_plans(parse_options([*flags, *adaptive, *weights, "--policies", "random"]))


def test_heads_of_a_model_with_a_map_beside_it_compete_unless_asked_otherwise(tmp_path: Path):
    folder = text_model(tmp_path / "model")
    TokenWorth(torch.zeros(1, 1, 3)).save(folder / "token_worth.npz")
    flags = ["--len", "1k", "--model-path", str(folder)]
    _, (_, ours) = make_plans(parse_options(flags))
    assert ours.plan.heads_compete
    assert ours.plan.environment["KVTIER_RETENTION"] == "0.25"
    for asked in (
        ["--head-budgets", "equal"],
        ["--scorer", "compactor", "--retention", "0.5"],
        ["--policies", "full,kvtier,window"],
    ):
        _, (_, ours, *_) = make_plans(parse_options([*flags, *asked]))
        assert ours.plan.heads_compete == (asked[0] == "--policies")


def test_a_dry_run_needs_no_tokenizer(tmp_path: Path):
    folder = write_model(tmp_path / "model", tokenizer=False)
    assert workload_of(folder, "--dry-run").script == "text"


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
        check_conversation(folder, document, run.requests)
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


def conversation(folder: Path, document: Document, requests: tuple[RequestRecord, ...]):
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


def check_conversation(
    folder: Path, document: Document, requests: tuple[RequestRecord, ...]
) -> None:
    """Check that what was asked is what the seed and the answers lead to."""
    for prompt, _, request in conversation(folder, document, requests):
        assert len(prompt) == request.prompt_tokens


def teacher_forced(
    folder: Path, document: Document, requests: tuple[RequestRecord, ...]
) -> list[float]:
    """NLL of the right answers by transformers, all but the first question's."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt, right, _ in list(conversation(folder, document, requests))[1:]:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *right]])).logits[0, len(prompt) - 1 : -1]
        picked = logits.log_softmax(-1).gather(1, torch.tensor(right)[:, None])
        found.append(-float(picked.mean()))
    return found


def test_full_kv_beside_heads_that_compete_is_not_refused(tmp_path: Path, monkeypatch):
    """Every worker reads the settings again: those of the baseline name the scorer, too."""
    folder, file = text_model(tmp_path / "model"), tmp_path / "worth.npz"
    TokenWorth(torch.zeros(1, 1, 3)).save(file)
    flags = ["--len", "1k", "--model-path", str(folder), "--retention", "0.5"]
    adaptive = ["--head-budgets", "adaptive", "--scorer", "reconstruction"]
    _, plans = make_plans(parse_options([*flags, *adaptive, "--scorer-file", str(file)]))
    for one in plans:
        with monkeypatch.context() as worker:
            for name, value in one.plan.environment.items():
                worker.setenv(name, value)
            assert scorer_of(load_settings()).name == "reconstruction"
