"""The start of an engine of the fault benchmark; tier/faults/engine.py says what it can be told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.remote import Remote, clean_environment, running_module
from benchmarks.tier.faults.engine import EngineJob
from benchmarks.tier.faults.load import LoadSession
from kvtier.config import ENV_PREFIX
from kvtier.heads.model.config import model_shape, read_config
from kvtier.heads.profile import full_profile

CLIENTS = 4
# So small a model is computed as fast as it is loaded on two cores, and then a tier is rightly not
# asked. On one core loading pays, and the other one is left to the tier and what fails it.
ENGINE_THREADS = 1
VISITS = 24
# The tokens of the device: as much as the clients need at once, and little of what they will need
# next.
DEVICE_TOKENS = 14_000
# Short spans make many small calls, and a short deadline many chances to miss it.
SPAN_TOKENS = 128
TIMEOUT_S = 0.5
SETTINGS = {
    "LOCALITY_SINK_TOKENS": "32",
    "LOCALITY_RECENT_TOKENS": str(SPAN_TOKENS),
    "LOCALITY_BRANCH_RECENT_TOKENS": "24",
    "TIER_SPAN_TOKENS": str(SPAN_TOKENS),
    "TIER_TIMEOUT_S": str(TIMEOUT_S),
}


@contextmanager
def running_engine(
    folder: Path, model: Path, sessions: Sequence[LoadSession], settings: Mapping[str, str]
) -> Iterator[Remote]:
    """An engine that drops nothing. folder: empty, its own; settings: KVTIER_* without prefix."""
    profile = folder / "head_profile.json"
    full_profile(model_shape(read_config(str(model)))).save(profile)
    (folder / "kvtier.toml").touch()
    own = {"CONFIG": folder / "kvtier.toml", "HEAD_PROFILE": profile, "DATA_DIR": folder}
    job = EngineJob(
        engine=engine_args(model), sessions=tuple(sessions), clients=CLIENTS, visits=VISITS
    )
    (folder / "job.json").write_text(job.model_dump_json())
    environment = clean_environment() | {"OMP_NUM_THREADS": str(ENGINE_THREADS)}
    for name, value in {**SETTINGS, **own, **settings}.items():
        environment[ENV_PREFIX + name] = str(value)
    with running_module(
        "benchmarks.tier.faults.engine", [folder / "job.json"], environment, folder / "engine.log"
    ) as remote:
        yield remote


def engine_args(model: Path) -> dict[str, Any]:
    """The arguments of sglang.Engine."""
    return {
        "model_path": str(model.resolve()),
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "kvtier",
        "radix_cache_backend": "kvtier",
        "max_total_tokens": DEVICE_TOKENS,
        "max_running_requests": CLIENTS,
        "chunked_prefill_size": 256,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "grammar_backend": "none",
        "log_level": "warning",
        "random_seed": 0,
        # Two engines take turns while throughput is measured: the other one must not spin.
        "sleep_on_idle": True,
    }
