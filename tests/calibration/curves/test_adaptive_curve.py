"""Curves where heads compete for entries: measured as a server serves, and found by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtier.calibration import kept_shares
from kvtier.calibration.curves import Measurement
from kvtier.calibration.documents import load_curve
from kvtier.calibration.kept_shares import (
    AdaptiveBudgets,
    EqualBudgets,
    measure_curve,
)
from kvtier.calibration.keys import policy_digest
from kvtier.calibration.measuring import curve_samples
from kvtier.cli import main
from kvtier.config import load_settings
from kvtier.heads.model.config import model_name, model_shape, read_config, weights_revision
from kvtier.heads.model.loading import load_model
from kvtier.heads.probes.context import HeadProbe
from kvtier.heads.probes.held import selected
from kvtier.heads.profile import full_profile
from kvtier.heads.reference.compaction import AdaptiveSession
from kvtier.heads.tokens import fit_tokens
from kvtier.retention.locality import LocalityRule
from kvtier.retention.rules import locality_rule, scorer_of
from kvtier.retention.scorers.reconstruction import Reconstruction
from kvtier.retention.scorers.simple import DistinctKeys
from kvtier.retention.shares import PAGE
from kvtier.retention.token_worth import TokenWorth

MODEL = Path(__file__).resolve().parents[3] / "models" / "kvtier-demo"
RULE = LocalityRule(sink_tokens=4, recent_tokens=16, branch_recent_tokens=8)
LENGTH = 512


@pytest.fixture(scope="module")
def worth() -> TokenWorth:
    return fit_tokens(str(MODEL), contexts=3, lengths=[LENGTH]).worth


@pytest.fixture(scope="module")
def adaptive(worth: TokenWorth) -> AdaptiveBudgets:
    return AdaptiveBudgets(load_model(str(MODEL)), RULE, Reconstruction.of(worth))


def test_keeping_everything_loses_nothing(adaptive: AdaptiveBudgets) -> None:
    (sample,) = curve_samples(str(MODEL), [LENGTH], 1, seed=1)
    context = adaptive(sample)
    profile = full_profile(model_shape(read_config(str(MODEL))))
    equal = EqualBudgets(HeadProbe(adaptive.model, RULE), profile, DistinctKeys())(sample)
    assert context.middle_tokens == equal.middle_tokens
    assert context.nll == pytest.approx(equal.nll, abs=1e-5)
    every = context.middle_tokens
    assert context.loss(every) == pytest.approx(equal.loss(every), abs=1e-4)
    assert context.loss(every // 20) > context.loss(every) + 0.1


def test_what_is_measured_is_what_a_session_keeps(
    adaptive: AdaptiveBudgets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference session, with which the engine's tokens are compared, has as many entries."""
    (sample,) = curve_samples(str(MODEL), [LENGTH], 1, seed=2)
    context = adaptive(sample)
    keep = context.middle_tokens // 4
    session = AdaptiveSession(adaptive.model, RULE, scorer=adaptive.scorer)
    session.keep_count = lambda prompt, span: keep
    session.turn(sample.context_ids, 0)
    measured = []

    def noting(kv: Any, kept: Tensor, group: int) -> Any:
        measured.append(kept)
        return selected(kv, kept, group)

    monkeypatch.setattr(kept_shares, "selected", noting)
    context.loss(keep)
    layers, heads, _ = context.worth.shape
    held = torch.tensor([list(session.retained(layer).values()) for layer in range(layers)])
    assert measured[0].sum(-1).tolist() == held.tolist()
    edges = len(sample.context_ids) - context.middle_tokens
    most = layers * heads * (keep + edges)
    assert most - PAGE < held.sum() <= most


def test_more_is_kept_for_less_loss(adaptive: AdaptiveBudgets) -> None:
    samples = curve_samples(str(MODEL), [LENGTH], 4, seed=3)
    found = measure_curve(adaptive, samples, retentions=(0.03, 0.3, 1.0))

    def mean(rows: list[Measurement]) -> float:
        return sum(row.ratio for row in rows) / len(rows)

    least, some, everything = (
        mean([row for row in found if low < row.retention <= high])
        for low, high in ((0.0, 0.1), (0.1, 0.5), (0.5, 1.0))
    )
    assert least < some < everything == pytest.approx(1.0, abs=1e-4)


def test_the_command_fits_what_tokens_are_worth_and_a_curve_that_a_server_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["calibrate", "--model-path", str(MODEL), "--scorer", "reconstruction"]
    arguments += ["--len", str(LENGTH + 384), "--contexts", "3", "--no-store"]
    arguments += ["--parts", "tokens,curve"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "token_worth.npz: fitted on" in shown
    assert "share kept at quality 0.95" in shown
    assert not (tmp_path / "head_profile.json").exists()
    settings = load_settings(
        scorer="reconstruction", scorer_file=tmp_path / "token_worth.npz",
        head_budgets="adaptive", quality=0.95,
    )  # fmt: skip
    profile = full_profile(model_shape(read_config(str(MODEL))))
    policy = policy_digest(profile, locality_rule(settings), scorer_of(settings))
    load_curve(tmp_path / "curve.json").check_fits(
        model_name(str(MODEL)), weights_revision(str(MODEL)), policy, "float32"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["curve"], "--scorer-file: expected what `kvtier calibrate --parts tokens` fits"),
        (["--parts", "curve"], "--scorer-file: expected what `kvtier calibrate --parts tokens`"),
        (["--parts", "tokens,all"], "--parts: expected some of tokens, curve, heads"),
    ],
)
def test_what_does_not_go_together_is_refused_before_the_model_loads(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for module in ("heads.tokens", "calibration.measuring"):
        monkeypatch.setattr(f"kvtier.{module}.load_model", lambda _: pytest.fail("too late"))
    kind = [arguments.pop(0)] if arguments[0] == "curve" else []
    given = [*kind, "--model-path", str(MODEL), "--scorer", "reconstruction", *arguments]
    assert main(["calibrate", *given, "--no-store", "--out", str(tmp_path)]) != 0
    assert message in capsys.readouterr().err
