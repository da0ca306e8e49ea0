"""The digest of what computed a server's KV: equal digests mean equal KV for equal tokens.

    parameters   every parameter and persistent buffer of the loaded model, byte for byte: whatever
                 file, format, quantization, update or other process they came from
    config       the model's configuration as it was resolved, overrides included (RoPE, norms, ...)
    arguments    server arguments that change what is computed with the same parameters
    scales       those of an fp8 cache, which may come from a file beside the parameters
    adapters     each LoRA adapter's weights and scaling, apart: they are part of a request's scope

The digest is made when the server starts, and again by the first request after a change of the
weights, which waits while every parameter is copied to the host and hashed. Files are not read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

from kvtier_sglang.pool.scales import LayerScales

# Under these server arguments equal parameters and configurations compute other KV, and not by
# rounding alone. All others of SGLang's are in `tests/engine/weights/server_arguments.txt`, as
# reviewed.
KV_ARGUMENTS = (
    "debug_tensor_dump_input_file",
    "dllm_algorithm",
    "dllm_algorithm_config",
    "dtype",
    "enable_decoder_swa_bounded_replay",
    "enable_encoder_swa_bounded_replay",
    "enable_precise_embedding_interpolation",
    "enable_quant_communications",
    "enable_tf32_matmul",
    "enable_w4a4_mxfp4_megamoe",
    "ep_dispatch_algorithm",
    "experts_shared_outer_loras",
    "flashinfer_mxfp4_moe_precision",
    "forward_hooks",
    "is_embedding",
    "kt_method",
    "kt_num_gpu_experts",
    "kv_cache_dtype",
    "lora_use_virtual_experts",
    "model_impl",
    "modelopt_quant",
    "prefill_kv_cache_dequant_dtype",
    "qsa_indexer_dtype",
    "quantization",
    "quantization_param_path",
    "quantize_and_serve",
    "rl_on_policy_target",
    "rl_quant_profile",
)
# The place of a configuration and its writer's version change nothing that is computed.
_UNRELATED_CONFIG = ("_name_or_path", "transformers_version")
_CHUNK_BYTES = 64 << 20


class ModelIdentity:
    """The identity of one model runner's model. The scheduler's thread uses it, between passes."""

    def __init__(self, model_runner: Any, server_args: Any) -> None:
        self._runner = model_runner
        self._arguments = {name: getattr(server_args, name) for name in KV_ARGUMENTS}
        # Each adapter's object, which its name or path outlives, and its digest.
        self._adapters: dict[str, tuple[Any, str]] = {}

    def digest(self) -> str:
        """Return a digest of parameters, configuration, arguments and scales as they are now: 32
        hex digits."""
        found = xxhash.xxh3_128()
        found.update(_canonical(self._arguments))
        found.update(_canonical(self._config()))
        scales = self._runner.token_to_kv_pool.scales.all()
        if any(one != LayerScales() for one in scales):
            found.update(_canonical(scales))
        digest_tensors(found, self._runner.model.state_dict())
        return found.hexdigest()

    def _config(self) -> dict[str, Any]:
        config = self._runner.model_config.hf_config.to_dict()
        return {name: value for name, value in config.items() if name not in _UNRELATED_CONFIG}

    def adapter(self, lora_id: str) -> str | None:
        """Return a digest of an adapter's contents: 32 hex digits; None where it is not loaded."""
        manager: Any = getattr(self._runner, "lora_manager", None)
        loaded: Mapping[str, Any] = {} if manager is None else manager.loras
        if lora_id not in loaded:
            return None
        known = self._adapters.get(lora_id)
        if known is None or known[0] is not loaded[lora_id]:
            known = (loaded[lora_id], adapter_digest(loaded[lora_id]))
            self._adapters = {key: one for key, one in self._adapters.items() if key in loaded}
            self._adapters[lora_id] = known
        return known[1]


def adapter_digest(adapter: Any) -> str:
    """Return a digest of an `sglang.srt.lora.lora.LoRAAdapter`: its weights, their scaling and its
    configuration."""
    found = xxhash.xxh3_128()
    found.update(_canonical({"scaling": adapter.scaling, "config": adapter.config.hf_config}))
    for index, layer in enumerate(adapter.layers):
        digest_tensors(found, layer.weights, f"{index}.")
    for name in ("embedding_layers", "added_tokens_embeddings"):
        digest_tensors(found, getattr(adapter, name), f"{name}.")
    return found.hexdigest()


def digest_tensors(found: Any, tensors: Mapping[str, Any], prefix: str = "") -> None:
    """Add tensors to a hash, by name: their types, shapes and bytes, wherever they are."""
    for name in sorted(tensors):
        tensor = tensors[name]
        if not isinstance(tensor, torch.Tensor):
            found.update(_canonical({prefix + name: tensor}))
            continue
        head = {"name": prefix + name, "dtype": tensor.dtype, "shape": list(tensor.shape)}
        found.update(_canonical(head))
        for chunk in _bytes_of(tensor):
            found.update(chunk)


def _bytes_of(tensor: torch.Tensor) -> Iterator[Any]:
    """Yield a tensor's bytes in pieces of host memory."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for begin in range(0, flat.numel(), _CHUNK_BYTES):
        yield flat[begin : begin + _CHUNK_BYTES].cpu().numpy()


def _canonical(value: object) -> bytes:
    """Return a value as JSON whose length comes first, so that what follows cannot be taken for a
    part of it."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain).encode()
    return len(text).to_bytes(8, "little") + text


def _plain(value: object) -> object:
    """Return what JSON lacks as what it has. Sets are sorted, as they have no order that two
    processes share."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)
