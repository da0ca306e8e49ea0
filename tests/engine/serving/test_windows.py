"""Models of which some layers attend to their newest tokens only: what is compressed before these
is what the reference keeps, and every slot is accounted for.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressing import POLICIES, RULE, RULE_ENV, competing
from engine_process import DEMO_MODEL, run_engine, run_script
from kinds import WINDOW, WINDOWS, Kind, write_model
from thorough import THOROUGH
from tierd.live_tier import live_tier

from kvtier import cli
from kvtier.heads.model.config import shape_of
from kvtier.heads.reference.compaction import AdaptiveSession
from kvtier.retention.scorers.reconstruction import Reconstruction
from kvtier.retention.shares import PAGE, FixedShare, Turn
from kvtier.retention.token_worth import TokenWorth, feature_width

pytestmark = pytest.mark.engine

NEW, SHARE = 12, 0.35
FUZZER = Path(__file__).parents[1] / "fuzz_runner.py"
SIZES = {"vocab_size": 384, "max_position_embeddings": 16384}
KEPT = FixedShare(SHARE)


def written(folder: Path, kind: str, **others: Any) -> tuple[Any, TokenWorth, dict[str, str]]:
    """A model in folder/model, a random map of its tokens' worth, and the settings by which its
    heads compete."""
    model = write_model(folder / "model", Kind(kind, WINDOWS), **SIZES, **others)
    shape = shape_of(model)
    width = feature_width(shape.num_kv_heads, shape.head_dim)
    random = torch.Generator().manual_seed(0)
    weights = torch.randn(shape.num_layers, shape.num_kv_heads, width, generator=random)
    worth = TokenWorth(weights)
    env = {**RULE_ENV, **competing(folder, worth), "KVTIER_RETENTION": str(SHARE)}
    return model, worth, env


def some(*counts: int) -> list[list[int]]:
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


def session_of(model: Any, worth: TokenWorth, window: int = WINDOW) -> AdaptiveSession:
    session = AdaptiveSession(model, replace(RULE, window=window), 128, Reconstruction.of(worth))
    session.keep_count = lambda prompt, span: KEPT.choose(Turn(prompt, span)).kept_tokens
    return session


@pytest.mark.parametrize("kind", ["Gemma3", "Cohere2"])
def test_four_turns_say_what_the_reference_says(tmp_path: Path, kind: str) -> None:
    """Heads of the full layers keep a third of all turns, but for the newest window."""
    model, worth, env = written(tmp_path, kind)
    lengths = ((250, 20, 120, 30), (90, 120, 120, 120), (60, 60, 60, 60), (200, 200, 10, 10))
    prompts = some(*(count for of in lengths for count in of))
    sessions = [prompts[at : at + 4] for at in range(0, len(prompts), 4)]
    expected = []
    for turns in sessions:
        session = session_of(model, worth)
        expected.append([session.turn(prompt, NEW).token_ids for prompt in turns])
    rounds: list[list[dict[str, Any]]] = []
    for turn, new in enumerate(zip(*sessions, strict=True)):
        rounds.append([{"input_ids": prompt, "max_new_tokens": NEW} for prompt in new])
        for index, request in enumerate(rounds[-1]):
            if turn:
                request["continues"] = [turn - 1, index]
    out = served(tmp_path, rounds, env)
    said = [[answer["output_ids"] for answer in answers] for answers in out["rounds"]]
    assert [list(turns) for turns in zip(*said, strict=True)] == expected
    assert out["state"]["compacted_tokens"] > 0


def test_such_a_model_is_calibrated_and_served(tmp_path: Path) -> None:
    """The worth of its tokens is fitted, of its full layers; a curve and heads are not."""
    write_model(tmp_path / "model", Kind("Gemma3", WINDOWS), **SIZES)
    for file in DEMO_MODEL.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "model")
    model, file = str(tmp_path / "model"), tmp_path / "worth.npz"
    command = f"calibrate tokens --model-path {model} --out {file} --len 256 --contexts 2 --quiet"
    assert cli.main(command.split()) == 0
    worth = TokenWorth.load(file)
    assert [bool(layer.any()) for layer in worth.weights] == [False, True, False]
    env = {**RULE_ENV, **competing(tmp_path, worth), "KVTIER_RETENTION": "0.25"}
    asked = [[{"input_ids": prompt, "max_new_tokens": NEW} for prompt in some(300, 500)]]
    assert served(tmp_path, asked, env)["state"]["compacted_tokens"] > 0
    options = ["--model-path", model, "--out", str(tmp_path), "--no-store", "--quiet"]
    for part in ("curve", "heads"):
        assert cli.main(["calibrate", "--parts", part, *options]) == 2


def test_a_branch_computes_a_window_and_the_next_one_nothing(tmp_path: Path) -> None:
    """The first session is left at 400 by two others, and goes on."""
    model, worth, env = written(tmp_path, "Gemma3")
    first, *tails, more = some(600, 150, 130, 40)
    session = session_of(model, worth)
    expected = [session.turn(first, NEW).token_ids]
    one, two = (session.cut(400 - WINDOW) for _ in tails)
    expected.append(one.turn(first[400 - WINDOW : 400] + tails[0], NEW).token_ids)
    two.turn(first[400 - WINDOW : 400], 0)
    expected.append(two.turn(tails[1], NEW).token_ids)
    expected.append(session.turn(more, NEW).token_ids)
    asked = [first, *(first[:400] + tail for tail in tails)]
    rounds: list[list[dict[str, Any]]] = [
        [{"input_ids": prompt, "max_new_tokens": NEW}] for prompt in asked
    ]
    rounds.append([{"continues": [0, 0], "input_ids": more, "max_new_tokens": NEW}])
    out = served(tmp_path, rounds, env)
    found = [request for (request,) in out["rounds"]]
    assert [request["cached_tokens"] for request in found] == [
        0, 400 - WINDOW, 400, 600 + NEW - 1
    ]  # fmt: skip
    assert [request["output_ids"] for request in found] == expected


def test_layers_with_a_window_hold_it_and_the_others_their_share(tmp_path: Path) -> None:
    """The pool's account says so, of 8,000 tokens of a model of which one of six layers is full."""
    window, tokens = 512, 8000
    types = [*["sliding_attention"] * 5, "full_attention"]
    _, _, env = written(
        tmp_path, "Gemma3", num_hidden_layers=6, layer_types=types, sliding_window=window
    )
    (prompt,) = some(tokens)
    asked = [[{"input_ids": prompt, "max_new_tokens": NEW}]]
    engine = {"chunked_prefill_size": 2048, "max_total_tokens": 10_000}
    before = served(tmp_path, asked, {}, **engine)["state"]
    after = served(tmp_path, asked, env, **engine)["state"]
    bytes_of_slot = before["kv_used_bytes"] / before["slots_used"]
    assert before["slots_used"] == tokens + NEW - 1
    dense = RULE.sink_tokens + window + NEW - 1
    kept = KEPT.choose(Turn(tokens - window, tokens - window - RULE.sink_tokens)).kept_tokens
    # The full layer's entries stand in pages of all six.
    bundles = -(-kept // PAGE // 6)
    assert after["slots_used"] == dense + PAGE * bundles
    assert after["kv_used_bytes"] == pytest.approx(after["slots_used"] * bytes_of_slot, rel=0.1)


def test_every_slot_is_accounted_for_over_a_tier(tmp_path: Path) -> None:
    """Hundreds of random requests, forks, aborts and edits, with a pool far too small."""
    _, _, env = written(tmp_path, "Gemma3")
    operations = 1000 if THOROUGH else 200
    plan = {
        "engine": {
            "model_path": str(tmp_path / "model"), "dtype": "float32", "max_total_tokens": 4000,
            "chunked_prefill_size": 256, **POLICIES["kvtier"],
        },
        "operations": operations, "longest": 1400, "seed": 11, "edits": True,
        "done": [["cut_spans"], ["variants"], ["restored_requests"]],
    }  # fmt: skip
    env |= {"KVTIER_TIER_SPAN_TOKENS": "32", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    with live_tier(tmp_path, "--memory", "256m") as tier:
        out = run_script(FUZZER, tmp_path, plan, env | {"KVTIER_TIER": tier.address})
    assert out["finished"] > 0.1 * operations
    assert out["state"]["integrity"] == []
    assert out["state"]["compacted_tokens"] > 0
    assert out["state"]["tier"]["restored_requests"] > 0
    assert out["after_flush"]["slots_used"] == 0
