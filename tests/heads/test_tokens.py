"""`kvtier calibrate tokens`, end to end on the demo model, and what it refuses before it starts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from kvtier.cli import main
from kvtier.errors import SizeError
from kvtier.heads import tokens
from kvtier.heads.model.config import model_shape, read_config, weights_revision
from kvtier.heads.tokens import fit_tokens
from kvtier.retention.scorers.reconstruction import Reconstruction
from kvtier.retention.token_worth import TokenWorth

DEMO = Path(__file__).parents[2] / "models" / "kvtier-demo"
LENGTH = 256


def run_cli(*arguments: object) -> int:
    return main(["calibrate", "tokens", *map(str, arguments)])


def test_the_command_writes_what_the_scorer_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, again = tmp_path / "worth.npz", tmp_path / "again.npz"
    arguments = ("--model-path", DEMO, "--len", LENGTH, "--contexts", 2, "--seed", 3)
    assert run_cli(*arguments, "--out", out) == 0
    shown = capsys.readouterr().out
    assert f"fitted on 2 contexts, {2 * LENGTH} tokens" in shown
    assert "of contexts it has not seen" in shown
    worth, shape = TokenWorth.load(out), model_shape(read_config(str(DEMO)))
    revision = weights_revision(str(DEMO))
    assert worth.revision == revision
    worth.check_fits(shape.num_layers, shape.num_kv_heads, shape.head_dim, revision)
    assert worth.queries is not None

    assert run_cli(*arguments, "--out", again, "--quiet") == 0
    assert capsys.readouterr() == ("", "")
    assert TokenWorth.load(again).digest == worth.digest


def test_the_second_moment_of_queries_is_that_of_the_models_own() -> None:
    """Each head's scaled; of the first layer, whose queries nothing that was kept decides."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    ids = list(range(6, 106))
    session = tokens.WatchedSession(model)
    session.turn(ids, 0)
    attention, found = model.model.layers[0].self_attn, []
    attention.q_proj.register_forward_hook(lambda _, __, out: found.append(out))
    with torch.inference_mode():
        model(torch.tensor([ids]))
    shape = model_shape(read_config(str(DEMO)))
    q = found[0][0].view(len(ids), shape.num_attention_heads, -1).double()
    group = shape.num_attention_heads // shape.num_kv_heads
    energy = session.seen[0].diagonal(dim1=-2, dim2=-1)
    half = shape.head_dim // 2
    for head in range(shape.num_kv_heads):
        mine = q[:, head * group : (head + 1) * group].square().sum((0, 1))
        # A rotation moves energy within a pair of numbers only.
        pairs = energy[head][:half] + energy[head][half:]
        torch.testing.assert_close(pairs, mine[:half] + mine[half:], rtol=1e-4, atol=1e-6)
    scaled = tokens._scaled(session.seen)
    mean = scaled.diagonal(dim1=-2, dim2=-1).mean(-1)
    torch.testing.assert_close(mean, torch.ones_like(mean), rtol=1e-3, atol=1e-3)


def test_it_finds_more_of_the_best_entries_than_chance() -> None:
    """A draw without looking would find the share itself."""
    fit = fit_tokens(str(DEMO), contexts=3, lengths=[LENGTH])
    assert fit.tokens == 3 * LENGTH
    for share, found in fit.agreement.items():
        assert share + 0.2 < found <= 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"--contexts": 0}, "--contexts: "),
        ({"--seed": -1}, "--seed: "),
        ({"--len": "4q"}, "--len: "),
        ({"--len": 2}, "--len: "),
        # Its repetition would lie behind the model's last position.
        ({"--len": "100k"}, "--len: expected at most 69632 tokens"),
        ({"--model-path": "/nowhere"}, "--model-path: "),
        ({"--out": "/nowhere/worth.npz"}, "--out: "),
        ({"--out": "."}, "--out: "),
        # In the model's folder it would change the model's revision.
        ({"--out": "worth.safetensors"}, "--out: expected another name"),
    ],
)
def test_bad_arguments_are_named_before_the_model_loads(
    options: dict[str, object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("kvtier.heads.tokens.load_model", lambda _: pytest.fail("too late"))
    monkeypatch.chdir(tmp_path)
    good: dict[str, object] = {"--model-path": DEMO, "--out": "worth.npz", "--contexts": 1}
    given = [text for option in (good | options).items() for text in option]
    assert run_cli(*given, "--quiet") == 2
    assert f"error: {said}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_length_is_checked_where_the_model_names_its_positions(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((DEMO / "tokenizer.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 1000}))
    assert tokens._lengths(str(tmp_path), None) == [192, 500]
    with pytest.raises(SizeError, match="at most 500 tokens"):
        tokens._lengths(str(tmp_path), [200, 501])
    (tmp_path / "config.json").write_text("{}")
    assert tokens._lengths(str(tmp_path), [501]) == [501]
    assert tokens._lengths(str(tmp_path), None) == list(tokens.DEFAULT_LENGTHS)


def test_a_scorers_file_is_read_once_and_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtier.config import load_settings
    from kvtier.retention.rules import scorer_of

    reads: list[Path] = []
    load = TokenWorth.load
    monkeypatch.setattr(TokenWorth, "load", lambda file: (reads.append(file), load(file))[1])
    file = tmp_path / "worth.npz"
    TokenWorth(torch.zeros(1, 1, 7)).save(file)
    settings = load_settings(
        scorer=Reconstruction.name, scorer_file=file, head_budgets="adaptive", retention=0.5
    )
    first = scorer_of(settings)
    assert scorer_of(settings) == first
    assert len(reads) == 1

    TokenWorth(torch.ones(1, 1, 7)).save(file)
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 10**9))
    assert scorer_of(settings) != first
    assert len(reads) == 2
