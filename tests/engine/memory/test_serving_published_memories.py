"""A live server of two ranks that serves what is published, through a Redis that comes and goes."""

from __future__ import annotations

import json
import os
import random
import re
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from calibration.redis_server import RedisServer
from compressing import RULE_ENV
from engine_process import DEMO_MODEL, REPOSITORY
from live_server import free_port, serving
from memory_samples import Stored, make_memory, tokens
from waiting import SAFETY_S

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


@dataclass
class Server:
    """A server as one asks it, and as operators do."""

    url: str
    log: Path

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=SAFETY_S) as answer:
            return json.loads(answer.read())

    def reloads(self) -> bool:
        told = self.post("/set_internal_state", {"server_args": {"kvtier_reload_memories": 1}})
        return all(told)

    def answer(self, prefix: list[int]) -> list[int]:
        params = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
        body = {"input_ids": [*prefix, *OWN], "sampling_params": params}
        return self.post("/generate", body)["output_ids"]

    def loaded(self) -> list[str]:
        with urllib.request.urlopen(f"{self.url}/server_info", timeout=SAFETY_S) as answer:
            state = json.loads(answer.read())["internal_states"][0]["kvtier"]
        return [one["digest"] for one in state["memories"]["loaded"]]

    def said(self) -> str:
        return self.log.read_text(errors="replace")


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """Make a server that is not running yet."""
    server = RedisServer()
    server.stop()
    yield server
    server.stop()


@pytest.fixture
def server(redis, tmp_path, monkeypatch) -> Iterator[Server]:
    for name in [name for name in os.environ if name.startswith("KVTIER_")]:
        monkeypatch.delenv(name)
    port, log = free_port(), tmp_path / "server.log"
    settings = {
        **RULE_ENV,
        **ranks_on_a_cpu(2),
        "KVTIER_REDIS_URL": redis.url,
        "KVTIER_DATA_DIR": str(tmp_path / "data"),
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    command = [
        *(sys.executable, "-m", "kvtier", "serve", "--model-path", str(DEMO_MODEL)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--tp-size", "2"),
        *("--max-total-tokens", "4096", "--sleep-on-idle", "--memory", "store"),
    ]
    with serving(command, port, log=log, cwd=REPOSITORY) as url:
        yield Server(url, log)


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
        return {name: server.answer(ids) for name, ids in prefixes.items()}

    assert "no prefix memory is served until they are read again" in server.said()
    assert server.loaded() == []
    assert served() == exact
    assert not server.reloads(), "the store is still away"

    redis.start()
    for name in LENGTHS:
        publish(tmp_path, name)
    assert server.reloads()
    assert served() == behind
    assert set(server.loaded()) == {one.memory.digest for one in memories.values()}

    assert main(["memory", "withdraw", "formats"]) == 0
    assert server.reloads()
    assert served() == {"tools": behind["tools"], "formats": exact["formats"]}

    rebuilt = make(model, tmp_path, "tools", 0.3).memory
    assert not server.reloads(), "what is there was never published"
    assert re.search("prefix memory 'tools' in .*: memory .* was published, but", server.said())
    assert server.loaded() == [memories["tools"].memory.digest]
    assert served() == {"tools": behind["tools"], "formats": exact["formats"]}

    publish(tmp_path, "tools")
    assert server.reloads()
    assert server.loaded() == [rebuilt.digest]
    (newest,) = answers(model, {"tools": MemoryPrefix(rebuilt.layers)}).values()
    assert server.answer(prefixes["tools"]) == newest

    redis.stop()
    assert not server.reloads()
    assert server.loaded() == [rebuilt.digest]
    assert server.answer(prefixes["tools"]) == newest
