"""Models loaded in bfloat16, as they are on every GPU: whatever calibrates them gets through, past
the first chunk of a context, too."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import RULE, make_ids, profile_of, tiny_model

from kvtier.calibration import measuring as curves
from kvtier.config import load_settings
from kvtier.heads import calibrate, tokens
from kvtier.heads.methods import METHODS, Target
from kvtier.heads.model import loading
from kvtier.heads.model.config import model_shape, read_config
from kvtier.heads.model.loading import load_model
from kvtier.heads.probes.watching import CHUNK_TOKENS
from kvtier.heads.profile import full_profile, load_profile
from kvtier.heads.reference.compaction import AdaptiveSession, CompactingSession
from kvtier.heads.reference.session import ReferenceSession

DEMO = Path(__file__).parents[2] / "models" / "kvtier-demo"
# Nats by which bfloat16 changes what these tiny models say.
ROUNDING = 0.35


def in_bfloat16(model_path: str) -> Any:
    return load_model(model_path).to(torch.bfloat16)


def sessions(model: Any) -> list[ReferenceSession]:
    """One of each kind, in chunks of few tokens."""
    profile = profile_of((0,), (), (0, 1))
    compacting = CompactingSession(model, profile, RULE, 16)
    adaptive = AdaptiveSession(model, RULE, 16)
    for session in (compacting, adaptive):
        session.keep_count = lambda prompt, span: span // 3
    return [ReferenceSession(model, profile, RULE, 16), compacting, adaptive]


def test_sessions_in_bfloat16_say_what_they_say_in_float32() -> None:
    both = [tiny_model(dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    for ours, exact in zip(*map(sessions, both), strict=True):
        for prompt in (make_ids(70), make_ids(40, seed=1)):
            logits = []
            for session in (ours, exact):
                session.turn(prompt, 0)
                logits.append(session.fork()._forward([7]).log_softmax(-1))
            assert (logits[0] - logits[1]).abs().max() < ROUNDING


@pytest.mark.parametrize("method", METHODS)
def test_heads_are_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(calibrate, "load_model", in_bfloat16)
    out, target = tmp_path / "profile.json", Target(share=0.5)
    calibrate.calibrate_heads(
        str(DEMO), method, out, target=target, lengths=[512], samples=1, rule=RULE
    )
    assert 0 < load_profile(out).ca_share < 1


def test_tokens_and_curves_are_calibrated_past_the_first_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class InChunks(tokens.WatchedSession):
        def __init__(self, model: Any) -> None:
            super().__init__(model)
            self.chunk_tokens = 256

    for module in (tokens, curves):
        monkeypatch.setattr(module, "load_model", in_bfloat16)
    monkeypatch.setattr(tokens, "WatchedSession", InChunks)
    fit = tokens.fit_tokens(str(DEMO), contexts=1, lengths=[600])
    assert fit.tokens == 600 > CHUNK_TOKENS
    profile = full_profile(model_shape(read_config(str(DEMO))))
    settings = load_settings(quality=0.9)
    curve = curves.calibrate_curve(str(DEMO), profile, settings, lengths=[512], contexts=2)
    assert curve.document.dtype == "bfloat16"


@pytest.mark.parametrize("room", [1.5, 0.5], ids=["in its own dtype", "a layer at a time"])
def test_a_model_that_is_larger_than_memory_is_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: float
) -> None:
    """room: how many times its files fit the memory."""
    tiny_model(dtype=torch.bfloat16, vocab_size=384).save_pretrained(tmp_path)
    for file in DEMO.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    expected = tokens.fit_tokens(str(tmp_path), contexts=1, lengths=[256]).worth
    monkeypatch.setattr(loading, "free_memory", lambda: int(room * size / loading.FOR_WEIGHTS))
    model = load_model(str(tmp_path))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert any(parameter.is_meta for parameter in model.parameters()) == (room < 1)
    found = tokens.fit_tokens(str(tmp_path), contexts=1, lengths=[256]).worth
    known = (expected.weights, found.weights)
    similar = torch.nn.functional.cosine_similarity(*(one.flatten() for one in known), dim=0)
    assert similar > 0.9
