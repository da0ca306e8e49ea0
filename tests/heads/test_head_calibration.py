"""Calibration end to end: on a tiny random model, and on the demo model where it is at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import profile_of

from kvtier.cli import main
from kvtier.errors import SizeError, UnsupportedModelError, UsageError
from kvtier.heads.calibrate import Calibrated, calibrate_heads
from kvtier.heads.methods import DEFAULT_METHOD, Target
from kvtier.heads.model.config import weights_revision
from kvtier.heads.model.loading import load_model
from kvtier.heads.probes.quality import Quality
from kvtier.heads.profile import load_profile
from kvtier.heads.reference.session import DEFAULT_RULE
from kvtier.heads.report import summary
from kvtier.heads.samples.plan import synthetic_plan
from kvtier.heads.samples.synthetic import make_samples, tasks_for
from kvtier.heads.verify import Verification
from kvtier.synthetic.recall import DEFAULT_LANGUAGE

DEMO = Path(__file__).parents[2] / "models" / "kvtier-demo"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that reads the recall language."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=DEFAULT_LANGUAGE.vocab_size, hidden_size=32, intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=1024, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    vocab = {"model": {"vocab": dict(DEFAULT_LANGUAGE.ids)}}
    (folder / "tokenizer.json").write_text(json.dumps(vocab))
    return folder


def run_cli(*arguments: object) -> int:
    return main(["calibrate", "heads", *map(str, arguments)])


@pytest.mark.parametrize("method", ["taylor", "contextkeeper"])
def test_the_command_writes_a_verified_profile(
    method: str, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "heads.json", tmp_path / "heads.png"
    arguments = (
        "--model-path", tiny_folder, "--method", method, "--share", 0.5,
        "--len", "448,512", "--samples", 2, "--seed", 3,
    )  # fmt: skip
    assert run_cli(*arguments, "--out", out, "--picture", picture) == 0
    shown = capsys.readouterr().out
    assert f"{method}: 2 of 4 KV heads" in shown
    assert "recall at 512:" in shown
    profile = load_profile(out)
    assert profile.num_ca_heads == 2
    assert profile.method == method
    assert profile.model == tiny_folder.name
    assert profile.revision == weights_revision(str(tiny_folder))
    assert profile.scores is not None
    metrics = [(cost.metric, cost.context_tokens, cost.samples) for cost in profile.costs]
    assert metrics == [
        (name, length, 32) for length in (448, 512) for name in ("recall", "token recall", "nll")
    ]
    assert profile.parameters["seed"] == 3

    again, drawn = tmp_path / "again.json", tmp_path / "again.png"
    assert run_cli(*arguments, "--out", again, "--picture", drawn, "--quiet") == 0
    assert capsys.readouterr() == ("", "")
    assert again.read_bytes() == out.read_bytes()
    assert drawn.read_bytes() == picture.read_bytes()
    assert drawn.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"method": "duo"}, UsageError, "--method"),
        ({"out": Path("/nowhere/p.json")}, UsageError, "--out"),
        ({"model_path": "/nowhere"}, UsageError, "--model-path"),
        ({"lengths": (2048,)}, SizeError, "--len"),
        ({"lengths": (512, 512)}, SizeError, "--len"),
        ({"lengths": (256,)}, SizeError, "--len"),
        ({"samples": 0}, UsageError, "--samples"),
        ({"target": Target()}, UsageError, "--share"),
    ],
)
def test_bad_arguments_are_named_before_the_model_loads(
    change: dict[str, Any], error: type[Exception], match: str, tiny_folder: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("kvtier.heads.calibrate.load_model", lambda _: pytest.fail("too late"))
    good: dict[str, Any] = {
        "model_path": str(tiny_folder), "method": "taylor", "out": tmp_path / "p.json",
        "target": Target(share=0.5), "lengths": (512,), "samples": 1,
    }  # fmt: skip
    with pytest.raises(error, match=match):
        calibrate_heads(**(good | change))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("--len", "4q"), ("--picture", "/no/p.png"), ("--seed", -1), ("--candidate-share", 0.4)],
)
def test_the_command_names_a_bad_option(
    name: str, value: object, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--model-path", tiny_folder, "--share", 0.5, "--out", "p.json", name, value)
    assert run_cli(*given) == 2
    assert f"error: {name}: expected" in capsys.readouterr().err


def test_a_model_whose_attention_cannot_be_replaced_is_refused(tmp_path: Path) -> None:
    """Bloom brings its own attention; every choice of heads would measure the same."""
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=16, hidden_size=16, n_layer=1, n_head=2)
    BloomForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="BloomForCausalLM"):
        load_model(str(tmp_path))


def test_the_summary_says_when_the_budget_does_not_hold_elsewhere() -> None:
    profile = profile_of((0,), (), ()).model_copy(update={"parameters": {"budget": 0.02}})
    full, worse = Quality(1.0, 1.0, 0.0), Quality(0.97, 1.0, 0.1)
    for kept, is_over in ((worse, True), (full, False)):
        found = Verification(4096, 64, full, kept, worse, worse)
        said = "\n".join(summary(Calibrated(profile, (found,))))
        assert ("over the budget of 2.0%" in said) == is_over


def test_the_heads_found_beat_random_ones_widely(tmp_path: Path) -> None:
    target = Target(share=0.25)
    result = calibrate_heads(
        str(DEMO), DEFAULT_METHOD, tmp_path / "p.json", target=target, lengths=(2048,), samples=2
    )
    (found,) = result.verifications
    assert found.full.tokens > 0.9
    assert found.profile.tokens > found.random.tokens + 0.4
    assert result.profile.num_ca_heads == 3
    assert found.worth > 0.9
    assert set(found.tasks) == {"recall", "near-miss"}
    assert sum(one.answers for one in found.tasks.values()) == found.answers


def test_own_samples_are_used_and_every_second_one_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = tasks_for(str(DEMO))
    lines = []
    for sample in make_samples(tasks.make, tasks.choosing, 4, [1024], seed=3):
        text = DEFAULT_LANGUAGE.decode
        questions = [
            {"question": text(q.prompt_ids), "answer": text(q.answer_ids)}
            for q in sample.questions[:4]
        ]
        line = {"context": text(sample.context_ids), "questions": questions, "task": "mine"}
        lines.append(json.dumps(line))
    file, out = tmp_path / "own.jsonl", tmp_path / "p.json"
    file.write_text("\n".join(lines))
    common = ("--model-path", DEMO, "--samples-file", file, "--out", out, "--share", 0.25)
    assert run_cli(*common) == 0
    assert "recall at 1k" in capsys.readouterr().out
    profile = load_profile(out)
    assert profile.costs[0].samples == 2 * 4
    assert profile.costs[0].full > 0.9
    assert profile.parameters["tasks"] == ["mine"]
    assert profile.parameters["contexts"] == [2, 2]
    file.write_text(lines[0] + "\n{}\n")
    for option, said in (
        (("--len", "4k"), "--len: expected nothing beside --samples-file"),
        (("--samples", 2), "--samples: expected nothing beside --samples-file"),
        ((), "line 2: context"),
    ):
        assert run_cli(*common, *option) == 2
        assert said in capsys.readouterr().err


def test_a_budget_is_judged_on_samples_that_nothing_was_chosen_on() -> None:
    plan = synthetic_plan(str(DEMO), [1024], 3, 0, DEFAULT_RULE)
    groups = (plan.calibration, plan.judging, plan.held_out[0])
    assert [len(group) for group in groups] == [3, 3, 3]
    assert len({sample.context_ids for group in groups for sample in group}) == 9
