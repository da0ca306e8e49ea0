"""A live server of two ranks that serves what is published, through a Redis that comes and goes."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from calibration.redis_server import RedisServer
from compressing import RULE_ENV
from demo_server import DEMO_MODEL, DemoServer, demo_server
from memory_samples import Stored, make_memory
from sessions import tokens

from benchmarks.common.engines import ranks_on_a_cpu
from kvtier.cli import main
from kvtier.heads.model.loading import load_model
from kvtier.memory.collecting import prefix_kv
from kvtier.memory.prefixes import ExactPrefix, MemoryPrefix, Prefix, generate_behind
from kvtier.memory.recipe import Recipe

pytestmark = pytest.mark.engine

LENGTHS = {"tools": 120, "formats": 70}
NEW = 4
OWN = tokens(random.Random(1), 20)


def make(model: Any, folder: Path, name: str, kept_share: float = 0.1) -> Stored:
    """A memory of its name; its prefix does not depend on what is kept."""
    recipe = Recipe(kept_share=kept_share, entries=16, key_width=8)
    return make_memory(model, folder / name, LENGTHS[name], recipe, seed=LENGTHS[name])


def reloads(server: DemoServer) -> bool:
    body = {"server_args": {"kvtier_reload_memories": 1}}
    return all(json.loads(server.post("/set_internal_state", body)))


def answer(server: DemoServer, prefix: list[int]) -> list[int]:
    return server.generate([*prefix, *OWN], NEW)["output_ids"]


def loaded(server: DemoServer) -> list[str]:
    return [one["digest"] for one in server.state()["memories"]["loaded"]]


def log(folder: Path) -> str:
    return (folder / "server.log").read_text(errors="replace")


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """Make a server that is not running yet."""
    server = RedisServer()
    server.stop()
    yield server
    server.stop()


@pytest.fixture
def server(redis, tmp_path, monkeypatch) -> Iterator[DemoServer]:
    for name in [name for name in os.environ if name.startswith("KVTIER_")]:
        monkeypatch.delenv(name)
    settings = {
        **RULE_ENV,
        **ranks_on_a_cpu(2),
        "KVTIER_REDIS_URL": redis.url,
        "KVTIER_DATA_DIR": str(tmp_path / "data"),
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    flags = ("--tp-size", "2", "--max-total-tokens", "4096", "--sleep-on-idle")
    with demo_server(tmp_path, *flags, "--memory", "store") as started:
        yield started


def publish(folder: Path, name: str) -> None:
    assert main(["memory", "publish", str(folder / name), "--name", name]) == 0


def answers(model: Any, prefixes: dict[str, Prefix]) -> dict[str, Sequence[int]]:
    return {
        name: generate_behind(model, prefix, LENGTHS[name], OWN, NEW)
        for name, prefix in prefixes.items()
    }


def test_what_is_published_is_served_from_the_next_reload_on(redis, server, tmp_path):
    """The server drops nothing, so that asking again says the same; SGLang's own checker ends it if
    its ranks part."""
    model = load_model(str(DEMO_MODEL))
    memories = {name: make(model, tmp_path, name) for name in LENGTHS}
    prefixes = {name: one.prefix for name, one in memories.items()}
    exact = answers(
        model, {name: ExactPrefix(prefix_kv(model, ids)) for name, ids in prefixes.items()}
    )
    behind = answers(
        model, {name: MemoryPrefix(one.memory.layers) for name, one in memories.items()}
    )
    assert all(behind[name] != exact[name] for name in LENGTHS)

    def served() -> dict[str, Sequence[int]]:
        return {name: answer(server, ids) for name, ids in prefixes.items()}

    assert "no prefix memory is served until they are read again" in log(tmp_path)
    assert loaded(server) == []
    assert served() == exact
    assert not reloads(server), "the store is still away"

    redis.start()
    for name in LENGTHS:
        publish(tmp_path, name)
    assert reloads(server)
    assert served() == behind
    assert set(loaded(server)) == {one.memory.digest for one in memories.values()}

    assert main(["memory", "withdraw", "formats"]) == 0
    assert reloads(server)
    assert served() == {"tools": behind["tools"], "formats": exact["formats"]}

    rebuilt = make(model, tmp_path, "tools", 0.3).memory
    assert not reloads(server), "what is there was never published"
    assert re.search("prefix memory 'tools' in .*: memory .* was published, but", log(tmp_path))
    assert loaded(server) == [memories["tools"].memory.digest]
    assert served() == {"tools": behind["tools"], "formats": exact["formats"]}

    publish(tmp_path, "tools")
    assert reloads(server)
    assert loaded(server) == [rebuilt.digest]
    (newest,) = answers(model, {"tools": MemoryPrefix(rebuilt.layers)}).values()
    assert answer(server, prefixes["tools"]) == newest

    redis.stop()
    assert not reloads(server)
    assert loaded(server) == [rebuilt.digest]
    assert answer(server, prefixes["tools"]) == newest
