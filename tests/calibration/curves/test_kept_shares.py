"""The curve of a model is measured as a server serves, and found by the server that it is for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtier.calibration import kept_shares
from kvtier.calibration.documents import load_curve
from kvtier.calibration.kept_shares import Budgets
from kvtier.calibration.keys import policy_digest
from kvtier.calibration.measuring import calibrate_curve, curve_samples
from kvtier.cli import main
from kvtier.config import Settings, load_settings
from kvtier.errors import UsageError
from kvtier.heads.model.config import model_name, model_shape, read_config, weights_revision
from kvtier.heads.model.loading import load_model
from kvtier.heads.probes.context import HeadProbe
from kvtier.heads.probes.held import selected
from kvtier.heads.profile import full_profile, load_profile
from kvtier.heads.reference.compaction import AdaptiveSession
from kvtier.heads.tokens import fit_tokens
from kvtier.retention.locality import LocalityRule
from kvtier.retention.rules import locality_rule, scorer_of
from kvtier.retention.scorers.reconstruction import Reconstruction
from kvtier.retention.scorers.simple import DistinctKeys
from kvtier.retention.shares import PAGE

MODEL = Path(__file__).resolve().parents[3] / "models" / "kvtier-demo"
PROFILE = load_profile(MODEL / "head_profile.json")
RULE = LocalityRule(sink_tokens=4, recent_tokens=16, branch_recent_tokens=8)
LENGTH = 512


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(str(MODEL))


@pytest.fixture(scope="module")
def adaptive(model: Any) -> Budgets:
    worth = fit_tokens(str(MODEL), contexts=3, lengths=[LENGTH]).worth
    return Budgets(model, RULE, Reconstruction.of(worth))


@pytest.mark.parametrize("compensation", [True, False])
def test_keeping_everything_costs_what_the_heads_cost_by_themselves(
    model: Any, adaptive: Budgets, compensation: bool
) -> None:
    """Nothing where all heads compete; with a profile what its locality heads cost the probe."""
    (sample,) = curve_samples(str(MODEL), [LENGTH], 1, seed=1)
    rule = replace(RULE, compensation=compensation)
    probe = HeadProbe(model, rule)
    asked = probe.prepare(sample)
    competing, equal = adaptive(sample), Budgets(model, rule, DistinctKeys(), PROFILE)(sample)
    every = competing.middle_tokens
    assert equal.middle_tokens == every
    assert equal.nll == pytest.approx(competing.nll, abs=1e-5)
    for context, kept in ((competing, probe.full()), (equal, probe.mask(PROFILE))):
        assert context.loss(every) == pytest.approx(asked.quality(kept).loss, abs=1e-4)
        assert context.loss(every // 20) > context.loss(every) + 0.1


def test_what_is_measured_is_what_a_session_keeps(
    adaptive: Budgets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference session, with which the engine's tokens are compared, has as many entries."""
    (sample,) = curve_samples(str(MODEL), [LENGTH], 1, seed=2)
    context = adaptive(sample)
    every = context.middle_tokens
    keep = every // 4
    session = AdaptiveSession(adaptive.model, RULE, scorer=adaptive.scorer)
    session.keep_count = lambda prompt, span: keep
    session.turn(sample.context_ids, 0)
    measured = []

    def noting(kv: Any, kept: Tensor, *rest: Any) -> Any:
        measured.append(kept)
        return selected(kv, kept, *rest)

    monkeypatch.setattr(kept_shares, "selected", noting)
    context.loss(keep)
    layers, heads, _ = context.worth.shape
    held = torch.tensor([list(session.retained(layer).values()) for layer in range(layers)])
    assert measured[0].sum(-1).tolist() == held.tolist()
    most = layers * heads * (keep + len(sample.context_ids) - every)
    assert most - PAGE < held.sum() <= most


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


def test_the_curve_of_an_fp8_server_is_measured_with_kv_rounded_to_it(model: Any) -> None:
    (sample,) = curve_samples(str(MODEL), [LENGTH], 1, seed=1)
    exact, rounded = (
        Budgets(model, RULE, DistinctKeys(), PROFILE, kv_dtype=dtype)(sample)
        for dtype in (None, torch.float8_e4m3fn)
    )
    for plain, stored in zip(exact.kv, rounded.kv, strict=True):
        for a, b in zip(plain, stored, strict=True):
            assert torch.equal(b, b.to(torch.float8_e4m3fn).float())
            assert not torch.equal(a, b)
    every = exact.middle_tokens
    assert rounded.loss(every) == pytest.approx(exact.loss(every), rel=0.2)
    known = str(MODEL), PROFILE, Settings()
    found = calibrate_curve(*known, lengths=[768], contexts=4, dtype="fp8_e4m3")
    assert found.document.dtype == "float8_e4m3fn"
    with pytest.raises(UsageError, match=r"^--dtype: expected one of float32"):
        calibrate_curve(*known, lengths=[768], dtype="int8")
