"""Ours that stand in for SGLang's classes have all that SGLang's code asks them for.

SGLang's source is read: every attribute that is loaded from something that is called as a backend,
pool, allocator, cache or platform is called there must be one of ours, or stand below with the
reason why that code never runs over kvtier.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sglang.srt
from sglang_versions import unreviewed

from kvtier_sglang.attention.backend import KvtierAttnBackend
from kvtier_sglang.platform import KvtierCpuPlatform
from kvtier_sglang.pool.allocator import BundleAllocator
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool
from kvtier_sglang.radix.cache import KvtierRadixCache

ROOT = Path(next(iter(sglang.srt.__path__)))
# Class -> the names of variables and functions by which SGLang's code has one.
OURS: dict[type, set[str]] = {
    KvtierAttnBackend: {"attn_backend", "get_attn_backend"},
    HeadPagedKVPool: {
        "token_to_kv_pool", "kvcache", "_kvcache", "get_token_to_kv_pool", "get_kvcache",
    },
    BundleAllocator: {"token_to_kv_pool_allocator"},
    KvtierRadixCache: {"tree_cache"},
    KvtierCpuPlatform: {"current_platform"},
}  # fmt: skip
# Code over other pools, caches and backends, which kvtier refuses or replaces.
ELSEWHERE = (
    "disaggregation/*", "hardware_backend/*", "layers/attention/*", "layers/dcp/*",
    "managers/hisparse_coordinator.py", "mem_cache/allocator/*", "mem_cache/buffer_mode/*",
    "mem_cache/hybrid_cache/*", "mem_cache/storage/*", "mem_cache/unified*",
    "models/deepseek*", "models/falcon_h1.py", "models/granitemoehybrid.py",
    "models/inkling_common/*", "models/jet_nemotron.py", "models/lfm2*", "models/nemotron_h.py",
    "models/sarvam_moe.py", "models/zaya.py", "speculative/dflash*", "speculative/dspark*",
    "speculative/eagle*",
)  # fmt: skip
HICACHE = "HiCache is refused"
HYBRID = "models with other layers than attention are refused"
LINKERS = "external cache linkers are refused"
UNIFIED = "the unified memory pool is refused"
SESSIONS = "sessions in the radix cache are refused"
SLIDING = "layers with windows are in the one pool: SGLang's pools for them are turned off"
GRAPHS = "CUDA graphs of prefill are refused"
COPIES = "of requests that a decoding server of a disaggregated pair retracts; refused"
PAGES = "of pages longer than one token, which are refused"
NEVER: dict[type, dict[str, str]] = {
    KvtierAttnBackend: {
        "enable_early_verify_metadata": "asked of backends that announce early verification",
        "extend_attention_block_m": "SGLang looks first whether a backend has it",
        "fused_qk_rope_store_kv_fp8": "Hunyuan 3 asks where a flag of its own names FlashAttention",
        "get_cpu_graph_seq_len_fill_value": "torch.compile is refused on a CPU",
        "init_cpu_graph_state": "torch.compile is refused on a CPU",
        "init_forward_metadata_capture_cpu_graph": "torch.compile is refused on a CPU",
        "tail_forward_metadata": "DeepSeek V4's (MLA) alone",
        "update_mamba_state_after_mtp_verify": HYBRID,
    },
    HeadPagedKVPool: {
        "_unified_kv": "DeepSeek V4's pool alone (MLA)",
        "clear_c4_req_states": "DeepSeek V4's pool alone (MLA)",
        "full_kv_pool": "HiCache's controller, and models with other layers, which are refused",
        "full_to_swa_index_mapping": SLIDING,
        "needs_paged_swa_allocator": "DeepSeek V4's pool alone (MLA)",
        "register_mapping": SLIDING,
        "request_window": SLIDING,
        "set_mla_kv_buffer": "models with MLA are refused",
        "translate_loc_from_full_to_swa": SLIDING,
    },
    BundleAllocator: {
        "flush_opportunistic": UNIFIED,
        "free_swa_segment": SLIDING,
        "logical_attn_allocator": "HiSparse is refused",
        "mamba_allocator": HYBRID,
        "mamba_slot_full_token_cost": HYBRID,
        "prewarm_compaction": UNIFIED,
        "set_disagg_move_gate": UNIFIED,
        "set_host_transfer_move_gate": UNIFIED,
        "shard_spec": "KV is not sharded over ranks: context parallelism is refused",
        "swa_capacity_and_available": SLIDING,
    },
    KvtierRadixCache: {
        "all_mamba_values_flatten": HYBRID,
        "attach_storage_backend": HICACHE,
        "bind_prefetch_ticket": HICACHE,
        "clear_storage_backend": HICACHE,
        "components": HICACHE,
        "dec_host_lock_ref": HICACHE,
        "detach_storage_backend": HICACHE,
        "ensure_session_generation": SESSIONS,
        "finish_external_linker_loads": LINKERS,
        "get_prefix_hash_values": HICACHE,
        "host_pool_group": HICACHE,
        "inc_host_lock_ref": HICACHE,
        "linker": LINKERS,
        "mamba_evictable_size": HYBRID,
        "mamba_protected_size": HYBRID,
        "open_radix_session": SESSIONS,
        "register_sidecar_pool": HICACHE,
        "release_swa_prefix_lock": SLIDING,
        "sanity_check": HYBRID,
        "sidecar_pool_specs": HICACHE,
        "sliding_window_size": SLIDING,
        "tree_core": "the unified tree's alone",
        "validate_retraction_host_capacity": HICACHE,
    },
    KvtierCpuPlatform: {},
}

LEFT_OPEN: dict[type, dict[str, str]] = {
    KvtierAttnBackend: {
        "forward_mixed": "of NPUs alone",
        "init_forward_metadata_for_breakable_cuda_graph_capture": GRAPHS,
        "prepare_forward_metadata_for_breakable_cuda_graph_replay": GRAPHS,
        "update_verify_buffers_to_fill_after_draft": "EAGLE is refused",
    },
    HeadPagedKVPool: {
        "get_cpu_copy": COPIES,
        "get_device_pool_infos": "HiSparse is refused",
        "load_cpu_copy": COPIES,
    },
    BundleAllocator: {"alloc_decode": PAGES, "alloc_extend": PAGES},
    KvtierRadixCache: {"ready_to_load_host_cache": HICACHE},
}

VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# SGLang's methods that ours override. One that SGLang renames would never be called here.
OVERRIDDEN: dict[type, set[str]] = {
    KvtierAttnBackend: {
        "forward_decode", "forward_extend", "get_cuda_graph_seq_len_fill_value",
        "init_cuda_graph_state", "init_forward_metadata", "init_forward_metadata_in_graph",
        "init_forward_metadata_out_graph", "shared_read_ends", "support_triton",
    },
    HeadPagedKVPool: {"get_key_buffer", "get_kv_buffer", "get_value_buffer", "set_kv_buffer"},
    BundleAllocator: {
        "alloc", "clear", "create_prefill_budget", "evict_to_free_tokens", "free",
        "max_new_tokens_for_memory", "verify_byte_accounting",
    },
    KvtierRadixCache: {
        "_delete_leaf", "_split_node", "check_hicache_events", "checkpoint", "dec_lock_ref",
        "inc_lock_ref", "init_load_back", "insert", "match_prefix", "on_release",
        "path_device_indices", "pop_prefetch_loaded_span", "pretty_print",
        "release_aborted_request", "release_host_resources", "reset", "touch_prefix",
    },
    KvtierCpuPlatform: {
        "_enum", "capabilities", "get_default_attention_backend",
        "get_default_speculative_draft_attention_backend", "get_speculative_cache_locs_fn",
        "get_torch_profiler_activity", "get_torch_profiler_activity_str",
        "is_pin_memory_available",
    },
}  # fmt: skip


@cache
def loads() -> frozenset[tuple[str, str]]:
    """(name that something has, attribute that is loaded from it) in SGLang's code that runs."""
    found = set()
    names = set().union(*OURS.values())
    for file in ROOT.rglob("*.py"):
        where = file.relative_to(ROOT).as_posix()
        if any(fnmatch(where, pattern) for pattern in ELSEWHERE):
            continue
        text = file.read_text()
        if not any(name in text for name in names):
            continue
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value.func if isinstance(node.value, ast.Call) else node.value
                name = getattr(owner, "attr", None) or getattr(owner, "id", None)
                if name in names:
                    found.add((name, node.attr))
    return frozenset(found)


def has(cls: type) -> Iterator[str]:
    """Yield what instances of a class have: what is of the class, and what its methods set."""
    yield from dir(cls)
    for base in cls.__mro__[:-1]:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.attr


@pytest.mark.parametrize("ours", OURS, ids=lambda cls: cls.__name__)
def test_it_has_whatever_sglangs_code_asks_it_for(ours: type) -> None:
    asked = {attribute for name, attribute in loads() if name in OURS[ours]}
    assert len(asked) > 20
    missing = asked - set(has(ours))
    assert not unreviewed(missing, set(NEVER[ours]))


def test_every_method_of_the_platform_answers() -> None:
    platform = KvtierCpuPlatform()
    for name, method in inspect.getmembers(KvtierCpuPlatform, inspect.isfunction):
        if name.startswith("_") or name == "reindex_device_id":
            continue
        some = {"device": "cpu", "kind": "mha", "algorithm": "NGRAM", "phase": "draft_decode",
                "backend": "torch_native", "quantization": "fp8", "quant": "fp8"}  # fmt: skip
        wanted = {
            parameter.name: some.get(parameter.name, 0)
            for parameter in list(inspect.signature(method).parameters.values())[1:]
            if parameter.default is parameter.empty
        }
        getattr(platform, name)(**wanted)


@pytest.mark.parametrize("ours", OURS, ids=lambda cls: cls.__name__)
def test_what_its_bases_leave_open_is_done_or_never_asked(ours: type) -> None:
    """A method of SGLang's that only raises NotImplementedError is one that a subclass has to
    give."""
    open_methods = set()
    for name, method in inspect.getmembers(ours, inspect.isfunction):
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
        body = [one for one in tree.body[0].body if not isinstance(one, ast.Expr)]  # type: ignore[attr-defined]
        raised = getattr(body[0], "exc", None) if len(body) == 1 else None
        named = getattr(raised, "func", raised)
        if getattr(named, "id", None) == "NotImplementedError":
            open_methods.add(name)
    assert not unreviewed(open_methods, set(LEFT_OPEN.get(ours, {})))


def overridden(ours: type) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each method of ours that overrides one of SGLang's, and both."""
    bases = [base for base in ours.__mro__ if base.__module__.startswith("sglang.")]
    for name in dir(ours):
        method = inspect.getattr_static(ours, name)
        theirs = next((vars(base)[name] for base in bases if name in vars(base)), None)
        ours_alone = theirs is None or method is theirs
        if not ours_alone and not name.startswith(("__", "_abc")):
            yield name, method, theirs


@pytest.mark.parametrize("ours", OURS, ids=lambda cls: cls.__name__)
def test_the_methods_that_are_overridden_are_sglangs_still(ours: type) -> None:
    found = {name for name, _, _ in overridden(ours)}
    assert not unreviewed(found, OVERRIDDEN[ours])


@pytest.mark.parametrize("ours", OURS, ids=lambda cls: cls.__name__)
def test_methods_take_what_those_that_they_override_take(ours: type) -> None:
    for name, method, theirs in overridden(ours):
        if not (inspect.isfunction(method) and inspect.isfunction(theirs)):
            continue
        taken, wanted = (inspect.signature(one).parameters.values() for one in (method, theirs))
        if any(one.kind in VARIABLE for one in taken):
            continue
        named = {one.name for one in wanted if one.kind not in VARIABLE}
        assert named <= {one.name for one in taken}, name
