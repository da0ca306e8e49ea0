"""An engine on this CPU for one session at a time: what `cost.decoding`, `cost.drafts` and
`memory.decoding` start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.common.remote import clean_environment, run_module
from benchmarks.gpu.serving_worker import Plan
from kvtier.config import ENV_PREFIX


def engine_arguments(model_path: Path, chunk: int, max_tokens: int, seed: int) -> dict[str, Any]:
    """Keyword arguments of sglang.Engine, without its backends. chunk: of a prefill, in tokens;
    max_tokens: in the pool."""
    return {
        "model_path": str(model_path),
        "device": "cpu",
        "dtype": "float32",
        "disable_cuda_graph": True,
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        "skip_server_warmup": True,
        "chunked_prefill_size": chunk,
        "max_total_tokens": max_tokens,
        # One by one: what is timed is a request's own passes.
        "max_running_requests": 1,
        "random_seed": seed,
        "log_level": "warning",
    }


def serve(
    plan: Plan, folder: Path, profile: Path | None = None, memory: Path | None = None
) -> dict[str, Any]:
    """Run an engine and its sessions, and return what they found. folder: for its files; profile:
    of the heads, and memory: of a prefix, for kvtier's cache."""
    file, out, log = (folder / name for name in ("plan.json", "out.json", "log"))
    file.write_text(plan.model_dump_json())
    environment = clean_environment()
    for name, path in (("HEAD_PROFILE", profile), ("MEMORY", memory)):
        if path is not None:
            environment[ENV_PREFIX + name] = str(path)
    run_module("benchmarks.gpu.serving_worker", [file, out], environment, log)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


__all__ = ["engine_arguments", "serve"]
