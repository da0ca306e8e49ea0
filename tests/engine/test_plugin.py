"""Start-up: every hook takes or the server stops, and bad combinations are refused by name."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch
from engine_process import DEMO_MODEL
from sglang.srt.plugins import hook_registry

from kvtier.calibration.documents import load_curve
from kvtier.config import load_settings
from kvtier.errors import (
    CalibrationDocumentError,
    CalibrationMismatchError,
    ConfigurationError,
    HeadProfileMismatchError,
    IncompatibleFlagError,
    StartupError,
    UsageError,
)
from kvtier.heads.model.config import model_shape, read_config
from kvtier.heads.profile import full_profile
from kvtier.retention.token_worth import TokenWorth
from kvtier_sglang import compat, hooks, platform, plugin, serve
from kvtier_sglang.occupancy import Occupancy
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool

TIERED = {"tier": "tier:7400", "retention": 0.3}


def server_args(**changes):
    args = {
        "model_path": str(DEMO_MODEL),
        "attention_backend": "kvtier",
        "radix_cache_backend": "kvtier",
    }
    return SimpleNamespace(**{**args, **changes})


# An argument of SGLang's, and a value that does not go with kvtier.
INCOMPATIBLE = {
    "speculative_algorithm": "EAGLE",
    "disaggregation_mode": "prefill",
    "enable_hierarchical_cache": True,
    "enable_lmcache": True,
    "pp_size": 2,
    "attn_cp_size": 2,
    "kv_cache_dtype": "mxfp8",
    "attention_backend": "triton",
    "decode_attention_backend": "triton",
    "kv_events_config": "{}",
    "enable_return_routed_experts": True,
    "disable_radix_cache": True,
    "strip_thinking_cache": True,
    "radix_eviction_policy": "tlru",
    "enable_unified_cache_external_linker": True,
    "enable_pdmux": True,
    "enable_two_batch_overlap": True,
    "enable_single_batch_overlap": True,
    "dllm_algorithm": "LowConfidence",
}
# The words of an error; SGLang's arguments; settings.
TOGETHER = [
    *(("--" + name.replace("_", "-"), {name: value}, {}) for name, value in INCOMPATIBLE.items()),
    ("--tp-size: .*--enable-dp-attention", {"tp_size": 2, "enable_dp_attention": True}, {}),
    # The demo model has four KV heads: each of so many ranks would score but a part of one's
    # queries.
    ("--tp-size: .*retention", {"tp_size": 8}, {"retention": 0.3}),
    ("--kept-dtype: .*heads that do not compete", {}, {"kept_dtype": "int4"}),
    ("--kept-dtype: .*fp8", {"kv_cache_dtype": "fp8_e4m3"}, {"kept_dtype": "int4"}),
    ("--enable-mixed-chunk", {"enable_mixed_chunk": True}, {"memory": "folder"}),
    ("--enable-torch-compile", {"enable_torch_compile": True, "device": "cpu"}, {}),
]


@pytest.mark.parametrize(("said", "flags", "settings"), TOGETHER)
def test_what_does_not_go_together_is_refused_by_name(said, flags, settings):
    with pytest.raises(IncompatibleFlagError, match=f"^{said}"):
        compat.check_server_args(server_args(**flags), load_settings(**settings))


def test_a_compiled_model_is_taken_on_a_gpu(monkeypatch):
    monkeypatch.setattr(compat.torch.cuda, "is_available", lambda: True)
    compiled = server_args(enable_torch_compile=True, device="cpu")
    compat.check_server_args(compiled, load_settings(kernels="reference"))


def test_a_bad_flag_of_kvtiers_is_refused_before_sglang_sees_any():
    with pytest.raises(ConfigurationError, match=r"^--tier-span-tokens: expected"):
        serve.main(["--model-path", str(DEMO_MODEL), "--tier-span-tokens", "1"])


@pytest.mark.parametrize(
    ("kernels", "said"),
    [
        ("magic", "expected one of auto, reference, triton, got 'magic'"),
        (
            "triton",
            "expected a backend that can run here, got .*'triton' needs a CUDA device",
        ),
    ],
)
def test_kernels_that_cannot_run_here_are_refused_before_any_model_loads(
    monkeypatch, kernels, said
):
    monkeypatch.setattr(compat.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("kvtier_kernels.triton_backend.launching.is_interpreted", lambda: False)
    with pytest.raises(ConfigurationError, match=f"^kernels: {said}"):
        compat.check_server_args(server_args(), load_settings(kernels=kernels))


REFRESHED = {"tier": "local:7311", "retention": 0.5, "refresh": "turn"}


@pytest.mark.parametrize(
    ("settings", "recorded"),
    [
        ({"kernels": "triton"}, True),
        (REFRESHED, True),
        ({"kernels": "reference"}, False),
    ],
)
def test_cuda_graphs_that_cannot_be_recorded_are_off_and_refused_by_name(
    monkeypatch, settings, recorded
):
    monkeypatch.setattr(compat.torch.cuda, "is_available", lambda: True)
    chosen = load_settings(**settings)
    args = server_args()
    compat.settle_cuda_graphs(args, chosen)
    assert args.disable_prefill_cuda_graph
    assert getattr(args, "disable_decode_cuda_graph", False) is not recorded
    for field, value, flag in (
        ("cuda_graph_backend_prefill", "breakable", "--cuda-graph-backend-prefill"),
        ("cuda_graph_config", {"prefill": {"backend": "full"}}, "--cuda-graph-config"),
    ):
        with pytest.raises(IncompatibleFlagError, match=f"^{flag}: expected prefill disabled"):
            compat.settle_cuda_graphs(server_args(**{field: value}), chosen)
    asked = server_args(cuda_graph_backend_decode="full")
    if recorded:
        compat.settle_cuda_graphs(asked, chosen)
    else:
        with pytest.raises(IncompatibleFlagError, match="--cuda-graph-backend-decode"):
            compat.settle_cuda_graphs(asked, chosen)
    compat.settle_cuda_graphs(server_args(cuda_graph_backend_decode="disabled"), chosen)


def test_arguments_that_are_resolved_are_left_alone_however_often_sglang_asks(monkeypatch):
    """This is the case on CUDA, where settling writes to them, in the parent and again in every
    child."""
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=str(DEMO_MODEL),
        device="cpu",
        attention_backend="kvtier",
        radix_cache_backend="kvtier",
        skip_tokenizer_init=True,
    )
    written = []
    monkeypatch.setattr(compat, "settle_cuda_graphs", lambda args, _: written.append(args))
    hooks.check_flags(args)
    args.resolve_once()
    with pytest.raises(AttributeError, match="read-only"):
        args.disable_prefill_cuda_graph = True
    hooks.check_flags(args)
    hooks.check_flags(pickle.loads(pickle.dumps(args)))
    assert len(written) == 1


def test_sglang_reads_what_settling_writes(monkeypatch):
    from sglang.srt.arg_groups.cuda_graph_hook import parse_cuda_graph_config
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=str(DEMO_MODEL), attention_backend="kvtier", radix_cache_backend="kvtier"
    )
    monkeypatch.setattr(compat.torch.cuda, "is_available", lambda: True)
    compat.settle_cuda_graphs(args, load_settings())
    parse_cuda_graph_config(args)
    resolved = resolving_view(args).cuda_graph_config
    assert resolved.prefill.backend == "disabled"
    assert resolved.decode.backend == "full"


class OddPool:
    """A pool of SGLang's that reports one size, as the MLA pools do, or none at all."""

    def __init__(self, size):
        self.size = size

    def get_kv_size_bytes(self):
        if self.size is None:
            raise NotImplementedError
        return self.size


@pytest.mark.parametrize("size", [1000, (400, 600), None])
def test_observing_never_fails_a_server_with_other_pools(size):
    occupancy = Occupancy()
    allocator = SimpleNamespace(size=9, available_size=lambda: 4, get_kvcache=lambda: OddPool(size))
    occupancy.observe_peak(None, SimpleNamespace(token_to_kv_pool_allocator=allocator), 1)
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=allocator)
    state: dict = {}
    occupancy.report_state(None, SimpleNamespace(scheduler=scheduler), state)
    assert ("kvtier" in state) == (size is not None)
    if size is not None:
        assert state["kvtier"]["kv_used_bytes"] == 500


def test_every_guarded_flag_exists_in_this_sglang():
    from sglang.srt.server_args import ServerArgs

    fields = set(ServerArgs.__struct_fields__) | set(dir(ServerArgs))
    assert set(compat._RULES) <= fields


OF_SGLANGS = {"attention_backend": "triton", "radix_cache_backend": None}


@pytest.mark.parametrize(("asked", "other"), [(1, {}), (32, {}), (None, {}), (64, OF_SGLANGS)])
def test_sglang_counts_tokens_whatever_page_size_is_asked_for(asked, other):
    """A server that does not use kvtier is left alone."""
    args = server_args(page_size=asked, **other)
    hooks.check_flags(args)
    assert args.page_size in ((asked,) if other else (None, 1))


@pytest.mark.parametrize("made_for", ["ModelShape", "revision"])
def test_a_profile_of_another_model_is_refused(tmp_path, made_for):
    shape = model_shape(read_config(str(DEMO_MODEL)))
    if made_for == "ModelShape":
        shape = shape.model_copy(update={"num_layers": 5})
    profile = full_profile(shape).model_copy(update={"revision": "0" * 16})
    profile.save(tmp_path / "p.json")
    with pytest.raises(HeadProfileMismatchError, match=f"^head_profile: made for {made_for}"):
        compat.check_server_args(server_args(), load_settings(head_profile=tmp_path / "p.json"))


def test_a_curve_of_another_model_is_refused(tmp_path):
    document = load_curve(DEMO_MODEL / "curve.json").model_copy(update={"revision": "0" * 16})
    (tmp_path / "c.json").write_text(document.to_json())
    settings = load_settings(quality=0.9, curve=tmp_path / "c.json")
    with pytest.raises(CalibrationMismatchError, match="revision"):
        compat.check_server_args(server_args(), settings)
    spoilt = document.model_copy(update={"alpha": 9e9})
    (tmp_path / "c.json").write_text(spoilt.to_json())
    with pytest.raises(CalibrationDocumentError, match=r"c\.json"):
        compat.check_server_args(server_args(), settings)


def test_a_hook_that_did_not_take_stops_the_server(monkeypatch):
    monkeypatch.setattr(hook_registry.HookRegistry, "_patched", set())
    with pytest.raises(StartupError, match="did not take effect"):
        plugin.verify()


def test_models_leave_writing_kv_to_attention_over_kvtiers_pool(monkeypatch):
    from sglang.srt.models import utils

    pool = HeadPagedKVPool.__new__(HeadPagedKVPool)
    for found, fused in ((pool, False), (object(), True)):
        monkeypatch.setattr(utils, "get_token_to_kv_pool", lambda found=found: found)
        assert hooks.refuse_fused_write(lambda batch: True, None) is fused


def test_every_hook_target_exists_and_takes():
    from sglang.srt.plugins import load_plugins

    load_plugins()
    plugin.verify()


def test_the_cpu_platform_steps_aside_where_cuda_is(monkeypatch):
    monkeypatch.delenv("KVTIER_FORCE_CPU", raising=False)
    monkeypatch.setattr(platform.torch.cuda, "is_available", lambda: True)
    assert platform.activate() is None
    monkeypatch.setenv("KVTIER_FORCE_CPU", "true")
    assert platform.activate() == "kvtier_sglang.platform:KvtierCpuPlatform"


def test_the_attention_backend_refuses_a_pool_that_is_not_ours():
    from kvtier_sglang.attention.backend import KvtierAttnBackend

    runner = SimpleNamespace(token_to_kv_pool=object())
    with pytest.raises(StartupError, match="HeadPagedKVPool"):
        KvtierAttnBackend(runner, load_settings())


def test_fitted_weights_of_another_model_are_refused_at_start_up(tmp_path):
    TokenWorth(torch.zeros(1, 1, 3)).save(tmp_path / "worth.npz")
    settings = load_settings(
        retention=0.5,
        head_budgets="adaptive",
        scorer="reconstruction",
        scorer_file=tmp_path / "worth.npz",
    )
    with pytest.raises(UsageError, match=r"scorer\.file: expected weights for 3 layers of 4 KV"):
        compat.check_server_args(server_args(model_path=str(DEMO_MODEL)), settings)
