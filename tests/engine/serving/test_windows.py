"""Models of which some layers attend to their newest tokens only. That they say what the reference
says, over a tier, too, is in test_kinds.py, and that every slot is accounted for in
test_nothing_leaks.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressing import POLICIES, RULE, RULE_ENV, competing, keeping
from engine_process import DEMO_MODEL, run_engine
from kinds import WINDOW, WINDOWS, Kind, write_model
from sessions import Prompt, one_by_one, said
from test_kinds import worth_of

from kvtier import cli
from kvtier.heads.reference.compaction import AdaptiveSession
from kvtier.retention.scorers.reconstruction import Reconstruction
from kvtier.retention.shares import PAGE, FixedShare, Turn
from kvtier.retention.token_worth import TokenWorth

pytestmark = pytest.mark.engine

NEW, SHARE = 12, 0.35
SIZES = {"vocab_size": 384, "max_position_embeddings": 16384}


def written(folder: Path, **others: Any) -> tuple[Any, TokenWorth, dict[str, str]]:
    """A model in folder/model, a random map of its tokens' worth, and the settings by which its
    heads compete."""
    model = write_model(folder / "model", Kind("Gemma3", WINDOWS), **SIZES, **others)
    worth = worth_of(model)
    return model, worth, {**RULE_ENV, **competing(folder, worth), "KVTIER_RETENTION": str(SHARE)}


def some(*counts: int) -> list[Prompt]:
    """Prompts of so many tokens, no two of which begin with the same one."""
    random = torch.Generator().manual_seed(4)
    return [
        [6 + at, *torch.randint(6, 384, (count - 1,), generator=random).tolist()]
        for at, count in enumerate(counts)
    ]


def served(folder: Path, rounds: Sequence[Any], env: dict[str, str], **engine: Any) -> Any:
    """Return what an engine says, and its state behind it."""
    plan = {
        "model_path": str(folder / "model"), "dtype": "float32", "max_total_tokens": 12_000,
        "chunked_prefill_size": 128, **POLICIES["kvtier"], **engine,
    }  # fmt: skip
    out = run_engine(folder, plan, rounds, env)
    assert out["state"]["integrity"] == []
    return out


def test_of_such_a_model_the_worth_of_tokens_is_calibrated_and_nothing_else(tmp_path: Path) -> None:
    """The worth of its tokens is fitted, of its full layers; a curve and heads are not."""
    write_model(tmp_path / "model", Kind("Gemma3", WINDOWS), **SIZES)
    for file in DEMO_MODEL.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "model")
    model, file = str(tmp_path / "model"), tmp_path / "worth.npz"
    command = f"calibrate tokens --model-path {model} --out {file} --len 256 --contexts 2 --quiet"
    assert cli.main(command.split()) == 0
    worth = TokenWorth.load(file)
    assert [bool(layer.any()) for layer in worth.weights] == [False, True, False]
    options = ["--model-path", model, "--out", str(tmp_path), "--no-store", "--quiet"]
    for part in ("curve", "heads"):
        assert cli.main(["calibrate", "--parts", part, *options]) == 2


def test_a_branch_computes_a_window_and_the_next_one_nothing(tmp_path: Path) -> None:
    """The first session is left at 400 by two others, and goes on."""
    model, worth, env = written(tmp_path)
    first, *tails, more = some(600, 150, 130, 40)
    rule = replace(RULE, window=WINDOW)
    session = keeping(AdaptiveSession(model, rule, 128, Reconstruction.of(worth)), SHARE)
    expected = [session.turn(first, NEW).token_ids]
    one, two = (session.cut(400 - WINDOW) for _ in tails)
    expected.append(one.turn(first[400 - WINDOW : 400] + tails[0], NEW).token_ids)
    two.turn(first[400 - WINDOW : 400], 0)
    expected.append(two.turn(tails[1], NEW).token_ids)
    expected.append(session.turn(more, NEW).token_ids)
    asked = [first, *(first[:400] + tail for tail in tails)]
    rounds = one_by_one([[prompt] for prompt in asked], NEW)
    rounds.append([{"continues": [0, 0], "input_ids": more, "max_new_tokens": NEW}])
    out = served(tmp_path, rounds, env)
    assert [request["cached_tokens"] for (request,) in out["rounds"]] == [
        0, 400 - WINDOW, 400, 600 + NEW - 1
    ]  # fmt: skip
    assert said(out) == [[answer] for answer in expected]


def test_layers_with_a_window_hold_it_and_the_others_their_share(tmp_path: Path) -> None:
    """The pool's account says so, of 8,000 tokens of a model of which one of six layers is full."""
    window, tokens = 512, 8000
    types = [*["sliding_attention"] * 5, "full_attention"]
    _, _, env = written(tmp_path, num_hidden_layers=6, layer_types=types, sliding_window=window)
    (prompt,) = some(tokens)
    asked = [[{"input_ids": prompt, "max_new_tokens": NEW}]]
    engine = {"chunked_prefill_size": 2048, "max_total_tokens": 10_000}
    before = served(tmp_path, asked, {}, **engine)["state"]
    after = served(tmp_path, asked, env, **engine)["state"]
    bytes_of_slot = before["kv_used_bytes"] / before["slots_used"]
    assert before["slots_used"] == tokens + NEW - 1
    dense = RULE.sink_tokens + window + NEW - 1
    span = Turn(tokens - window, tokens - window - RULE.sink_tokens)
    kept = FixedShare(SHARE).choose(span).kept_tokens
    # The full layer's entries stand in pages of all six.
    bundles = -(-kept // PAGE // 6)
    assert after["slots_used"] == dense + PAGE * bundles
    assert after["kv_used_bytes"] == pytest.approx(after["slots_used"] * bytes_of_slot, rel=0.1)
