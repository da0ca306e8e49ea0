"""Kinds of model that kvtier cannot serve are refused by name before anything loads, whether a
folder or an id of the hub names them; and what only loaded layers tell is refused, too.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from engine_process import CLEAN_ENVIRONMENT, DEMO_MODEL
from kinds import REFUSED, configuration, obstacle, snapshot
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from kvtier import cli
from kvtier.config import load_settings
from kvtier.errors import IncompatibleFlagError, UnsupportedModelError
from kvtier.heads.calibrate import calibrate_heads
from kvtier.heads.methods import Target
from kvtier.heads.model.config import folder_of, model_name, read_config, weights_revision
from kvtier.heads.model.support import NESTED, check_supported, windows_of
from kvtier.heads.profile import load_profile
from kvtier_sglang import compat, support
from kvtier_sglang.cpu_drafts import FIRST_VERSION
from kvtier_sglang.versions import sglang_version

# Those whose layers have windows but for some: the window, and which layer of how many has none.
WITH_WINDOWS: dict[str, tuple[str, int, int]] = {
    "Gemma 3": ("Gemma3TextConfig", 4096, 6),
    "Gemma 3, whole": ("Gemma3Config", 4096, 6),
    "Gemma 3, before layers had types": ("Gemma3TextConfig", 4096, 6),
    "OLMo 3": ("Olmo3Config", 4096, 4),
    "Cohere 2": ("Cohere2Config", 4096, 4),
    "gpt-oss": ("GptOssConfig", 128, 2),
}
# Flag -> SGLang's arguments, kvtier's settings.
BESIDE_WINDOWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "--speculative-algorithm": ({"speculative_algorithm": "NGRAM"}, {}),
    "--memory": ({}, {"memory": "store"}),
    "--head-profile": ({}, {"head_profile": DEMO_MODEL / "head_profile.json"}),
    "--refresh": ({}, {"retention": 0.5, "refresh": "turn", "tier": "localhost:1"}),
    "--reuse-behind-edits": ({}, {"reuse_behind_edits": "on"}),
    "--head-budgets": ({}, {"retention": 0.5, "head_budgets": "equal"}),
}
SERVED: dict[str, dict[str, Any]] = {
    "a window as long as all positions": {"sliding_window": 131072},
    "a window that is switched off": {"sliding_window": 512, "use_sliding_window": False},
    "layers with such a window": {
        "sliding_window": 131072, "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip


def written(kind: str) -> dict[str, Any]:
    """Return what stands in a model's config.json."""
    if kind in REFUSED:
        return configuration(REFUSED[kind])
    found = configuration(WITH_WINDOWS[kind][0])
    if kind == "OLMo 3":
        # It is as long as that of the models that people run; the default's may fit into a window.
        found["max_position_embeddings"] = 131072
    if kind.endswith("before layers had types"):
        found["sliding_window"] = getattr(transformers, WITH_WINDOWS[kind][0])().sliding_window
        del found["layer_types"]
    return found


def arguments(model_path: str) -> SimpleNamespace:
    return SimpleNamespace(
        model_path=model_path, attention_backend="kvtier", radix_cache_backend="kvtier"
    )


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub's, on a machine that has no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def in_hub(hub: Path, kind: str) -> str:
    """The id of a model of a kind, of which there is a snapshot."""
    # SGLang remembers what it has read of an id.
    name = f"some/{re.sub('[^A-Za-z0-9]+', '-', kind)}"
    (snapshot(hub, name) / "config.json").write_text(json.dumps(written(kind)))
    return name


@pytest.mark.parametrize("kind", REFUSED)
def test_a_kind_that_cannot_be_served_is_refused_by_name(hub: Path, kind: str) -> None:
    """docs/models.md says what each of them is told (serving/test_kinds.py)."""
    why = re.escape(obstacle(written(kind)))
    assert why
    with pytest.raises(UnsupportedModelError, match=rf"^--model-path: .*{why}"):
        compat.check_server_args(arguments(in_hub(hub, kind)), load_settings())


@pytest.mark.parametrize("key", NESTED)
def test_a_language_model_is_found_where_it_is_one_part_of_several(key: str) -> None:
    part = {key: {"kv_lora_rank": 512}}
    for nested in (part, {"thinker_config": part}) if key != "thinker_config" else (part,):
        with pytest.raises(UnsupportedModelError, match=r"X \(MLA\)"):
            check_supported({"architectures": ["X"], **nested})


@pytest.mark.engine
def test_a_server_that_is_started_with_one_ends_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(written("Mistral with a window")))
    command = [sys.executable, "-m", "kvtier", "serve", "--model-path", str(tmp_path)]
    done = subprocess.run(
        [*command, "--device", "cpu"],
        env=CLEAN_ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    said = "kvtier: error: --model-path: .*windows in every.*"
    assert re.fullmatch(said, done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", SERVED)
def test_a_window_that_leaves_nothing_out_is_none(kind: str) -> None:
    check_supported({"max_position_embeddings": 131072, **SERVED[kind]})
    if "use_sliding_window" not in SERVED[kind]:
        with pytest.raises(UnsupportedModelError, match="sliding windows"):
            check_supported({"max_position_embeddings": 131073, **SERVED[kind]})


def test_a_hub_id_has_the_name_and_revision_of_its_snapshot(hub: Path) -> None:
    folder = snapshot(hub, "some/model")
    for file in DEMO_MODEL.iterdir():
        (folder / file.name).symlink_to(file)
    assert folder_of("some/model") == folder
    assert folder_of("some/other") is None
    assert folder_of("not an id!") is None
    assert model_name(str(folder)) == model_name("some/model") == "some/model"
    assert weights_revision("some/model") == weights_revision(str(DEMO_MODEL))
    compat.check_server_args(arguments("some/model"), load_settings())
    settings = load_settings(head_profile=DEMO_MODEL / "head_profile.json", retention=0.5)
    compat.check_server_args(arguments("some/model"), settings)


def test_a_hub_id_is_calibrated_as_its_snapshot(hub: Path, tmp_path: Path) -> None:
    folder, out = snapshot(hub, "some/calibrated"), tmp_path / "profile.json"
    for file in DEMO_MODEL.iterdir():
        (folder / file.name).symlink_to(file)
    command = f"calibrate heads --model-path some/calibrated --out {out} --quiet"
    options = "--method contextkeeper --share 0.5 --len 512 --samples 1"
    assert cli.main(f"{command} {options}".split()) == 0
    profile = load_profile(out)
    assert profile.model == "some/calibrated"
    assert profile.revision == weights_revision(str(DEMO_MODEL))


@pytest.mark.parametrize("kind", ["Mistral with a window", "Gemma 3, whole"])
def test_heads_are_calibrated_of_models_without_windows(hub: Path, kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match="sliding windows"):
        calibrate_heads(in_hub(hub, kind), "taylor", hub / "p.json", target=Target(share=0.5))


@pytest.mark.parametrize("kind", WITH_WINDOWS)
def test_windows_of_some_layers_are_served(hub: Path, kind: str) -> None:
    path = in_hub(hub, kind)
    compat.check_server_args(arguments(path), load_settings())
    config, (window, every) = read_config(path), WITH_WINDOWS[kind][1:]
    windows = windows_of(config)
    assert len(windows) == config["num_hidden_layers"]
    assert [at for at, one in enumerate(windows) if one is None][:2] == [every - 1, 2 * every - 1]
    assert set(windows) == {None, window}


def test_pictures_whose_tokens_see_ahead_are_refused(tmp_path: Path) -> None:
    whole = {**written("Gemma 3, whole"), "architectures": ["Gemma3ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    given = arguments(str(tmp_path))
    compat.check_server_args(given, load_settings())
    given.enable_multimodal = True
    with pytest.raises(IncompatibleFlagError, match=r"^--enable-multimodal: .*text alone"):
        compat.check_server_args(given, load_settings())


@pytest.mark.parametrize("flag", BESIDE_WINDOWS)
def test_what_does_not_go_with_windows_is_refused(tmp_path: Path, flag: str) -> None:
    if flag == "--speculative-algorithm" and sglang_version() < FIRST_VERSION:
        pytest.skip("on a CPU this SGLang's drafts are refused whatever the model")
    (tmp_path / "config.json").write_text(json.dumps(written("Gemma 3")))
    asked, settings = BESIDE_WINDOWS[flag]
    given = SimpleNamespace(**vars(arguments(str(tmp_path))), **asked)
    expected = rf"^{flag}: .* together with a model of which some layers have a window"
    with pytest.raises(IncompatibleFlagError, match=expected):
        compat.check_server_args(given, load_settings(**settings))


def attention(**changed: Any) -> RadixAttention:
    """A layer of SGLang's, with some attributes changed."""
    layer = RadixAttention(num_heads=4, head_dim=16, scaling=0.25, num_kv_heads=2, layer_id=0)
    for name, value in changed.items():
        assert hasattr(layer, name)
        setattr(layer, name, value)
    return layer


LAYERS: dict[str, dict[str, Any]] = {
    "a window of 65 tokens": {"sliding_window_size": 64},
    "logit_cap = 30.0": {"logit_cap": 30.0},
    "attn_type": {"attn_type": AttentionType.ENCODER_ONLY},
    "is_cross_attention = True": {"is_cross_attention": True},
    "use_irope = True": {"use_irope": True},
    "pos_encoding_mode = ALIBI": {"pos_encoding_mode": "ALIBI"},
    "xai_temperature_len = 1024": {"xai_temperature_len": 1024},
    "size of keys and values": {"v_head_dim": 8},
    "KV heads": {"tp_k_head_num": 4},
}
POOL: Any = SimpleNamespace(head_num=2, head_dim=16, layers=range(2))


@pytest.mark.parametrize("why", LAYERS)
def test_a_loaded_layer_that_the_backend_does_not_compute_is_refused(why: str) -> None:
    shape = {"heads": 2, "head_dim": 16, "context": 4096}
    assert support.check_layer(attention(), **shape) is None
    # A window as long as the longest request is none.
    assert support.check_layer(attention(sliding_window_size=4096), **shape) is None
    # Some of SGLang's models count a token itself, others do not.
    for size in (99, 100):
        windowed = attention(sliding_window_size=size)
        assert support.check_layer(windowed, window=100, **shape) == 100
    with pytest.raises(UnsupportedModelError, match=why):
        support.check_layer(attention(**LAYERS[why]), **shape)


class Handing(torch.nn.Module):
    """A model that hands a repeated token's values on from layer to layer. at: what it makes of
    positions."""

    def __init__(
        self,
        *layers: RadixAttention,
        at: Callable[[torch.Tensor], torch.Tensor] = lambda positions: positions,
        **asked: Any,
    ) -> None:
        super().__init__()
        self.rotary_emb = torch.nn.Identity()
        self._layers, self._at, self._asked = list(layers), at, asked

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> None:
        positions = self._at(positions)
        kv = torch.ones(len(ids), 32)
        for layer in self._layers:
            self.rotary_emb(positions)
            layer(torch.ones(len(ids), 64), kv, kv, batch, **self._asked)


def runner(*layers: RadixAttention, config: dict[str, Any] | None = None, **asked: Any) -> Any:
    """A runner of such a model."""
    return SimpleNamespace(
        device="cpu", model=Handing(*layers, **asked), req_to_token_pool=None,
        model_config=SimpleNamespace(
            context_len=512, hf_text_config=SimpleNamespace(to_dict=lambda: config or {})
        ),
    )  # fmt: skip


def test_positions_that_a_model_counts_otherwise_are_seen() -> None:
    """Gemma 3 with its vision tower counts them from 1, and does so in place."""
    layers = attention(), attention(layer_id=1)
    counted = support.confirm(runner(*layers, at=lambda positions: positions.add_(1)), POOL)
    assert counted.shift == 1
    assert counted.positions[0] == 0
    doubled = support.confirm(runner(*layers, at=lambda positions: positions * 2), POOL)
    with pytest.raises(UnsupportedModelError, match="something else than their tokens' index"):
        support.rotations(torch.nn.Module(), doubled)


def test_what_layers_hand_to_attention_is_confirmed() -> None:
    keys, positions, windows, shift = support.confirm(
        runner(attention(), attention(layer_id=1)), POOL
    )
    assert [k.shape for k in keys] == [(2, len(positions), 16)] * 2
    assert windows == (None, None)
    assert shift == 0
    with pytest.raises(UnsupportedModelError, match=r"layer 0: attention with \['q_rope'\]"):
        support.confirm(runner(attention(), q_rope=torch.zeros(4)), POOL)
    sinks = runner(attention(), attention(layer_id=1), sinks=torch.zeros(4))
    with pytest.raises(UnsupportedModelError, match="sinks where no layer has a window"):
        support.confirm(sinks, POOL)
    with pytest.raises(UnsupportedModelError, match="layer 0: a second attention"):
        support.confirm(runner(attention(), attention()), POOL)
    with pytest.raises(UnsupportedModelError, match=r"no attention in layers \[1\]"):
        support.confirm(runner(attention()), POOL)
