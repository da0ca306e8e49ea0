"""A run that has something to show: a served demo model with a quality target, prefix memories, a
tier that it spills to, restores from and refreshes near, and a Redis with its curve."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from calibration.redis_server import RedisServer, redis_server
from engine.memory.memory_samples import Stored, make_memory
from engine_process import CLEAN_ENVIRONMENT, DEMO_MODEL, PATIENT
from live_server import free_port, serving
from prometheus_client.parser import text_string_to_metric_families
from tierd.live_tier import LiveTier, live_tier
from waiting import SAFETY_S, wait_for

from kvtier.calibration.documents import load_curve
from kvtier.calibration.store.opening import open_store
from kvtier.config import load_settings
from kvtier.heads.model.loading import load_model
from kvtier.memory.recipe import Recipe

ADMIN_KEY = "the-admins-own"
SESSIONS = 3
EXPORTER = shutil.which("prometheus-redis-exporter")
RESTORED_TOKENS = 1600 * SESSIONS

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass
class SeenRun:
    """The parts that run. prompts: what its sessions have said so far, with the answers."""

    url: str
    tier: LiveTier
    redis: RedisServer
    memory: Stored
    prompts: list[list[int]]
    redis_metrics_url: str | None
    # Before the last time that all sessions came back.
    restored_before: float = 0

    def state(self) -> dict[str, Any]:
        """Return what the engine says of its tier just now; its status page may be a second old."""
        _, text = self.get("/server_info")
        return json.loads(text)["internal_states"][0]["kvtier"]["tier"]

    def get(self, path: str, key: str | None = ADMIN_KEY) -> tuple[int, str]:
        """The status and the text of the answer."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            with urlopen(Request(f"{self.url}{path}", headers=headers), timeout=SAFETY_S) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def status(self) -> dict[str, Any]:
        """The status of the only replica."""
        code, text = self.get("/kvtier/status.json?sessions=200")
        assert code == 200, text
        return json.loads(text)["replicas"][0]

    def ask(self, prompt: list[int]) -> list[int]:
        """The answer, streamed: only then does SGLang time what is between tokens."""
        sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        events = [line for line in self.post("/generate", body).splitlines() if line]
        assert events[-1] == "data: [DONE]"
        return json.loads(events[-2].removeprefix("data: "))["output_ids"]

    def post(self, path: str, body: dict[str, Any] | None = None) -> str:
        """The text of the answer."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}
        data = json.dumps(body or {}).encode()
        with urlopen(Request(f"{self.url}{path}", data, headers), timeout=SAFETY_S) as answer:
            return answer.read().decode()

    def say(self, tokens: int, seed: int) -> None:
        """Every session says something more, one after the other."""
        rng = random.Random(seed)
        for prompt in self.prompts:
            prompt += [rng.randrange(136, 384) for _ in range(tokens)]
            prompt += self.ask(prompt)

    def ask_memory(self, seed: int) -> None:
        """A request that the prefix memory answers."""
        rng = random.Random(seed)
        self.ask([*self.memory.prefix, *(rng.randrange(136, 384) for _ in range(40))])

    def settle(self) -> None:
        """Wait until nothing is on its way to the tier any more, and the status page says so,
        too."""
        wait_for(lambda: not self.state()["pending"])
        restored = self.state().get("restored_tokens", 0)

        def told() -> bool:
            found = self.status()["figures"]
            return (
                not found["kvtier_engine_tier_pending"][""]
                and found["kvtier_restored_tokens"][""] == restored
            )

        wait_for(told)

    def flush(self) -> None:
        """SGLang refuses while a request is being put away, which its answer does not wait for."""

        def flushed() -> bool:
            try:
                self.post("/flush_cache")
            except HTTPError:
                return False
            return True

        wait_for(flushed)

    def drive(self, watched: Callable[[], None]) -> None:
        """Two turns; and twice an empty cache, a turn that comes back, another, and a request of
        the memory. watched: returns once whoever looks at the run has looked again. All that counts
        does so before that and after it, and so has a rate."""
        self.say(1500, seed=1)
        self.say(300, seed=2)
        for seed in (3, 4):
            self.settle()
            self.flush()
            self.restored_before = self.state().get("restored_tokens", 0)
            self.say(200, seed=seed)
            self.say(100, seed=10 + seed)
            self.ask_memory(seed=20 + seed)
            self.settle()
            watched()


def samples_of(text: str) -> Samples:
    """Return what a target exports, by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(url: str) -> Samples:
    with urlopen(url, timeout=SAFETY_S) as answer:
        return samples_of(answer.read().decode())


@contextmanager
def seen_run(folder: Path, *flags: str) -> Iterator[SeenRun]:
    """Started, and not driven yet. flags: more of them for the engine."""
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server())
        tier = stack.enter_context(
            live_tier(folder, "--memory", "256m", "--refresh-workers", "1", "--metrics-port", "0")
        )
        recipe = Recipe(0.3, 40, 0.5, 7, 0.0)
        memory = make_memory(load_model(str(DEMO_MODEL)), folder / "memories/m", 150, recipe, 2)
        environment = {**CLEAN_ENVIRONMENT, **PATIENT}
        environment["KVTIER_REDIS_URL"] = redis.url
        with open_store(load_settings(redis_url=redis.url)) as store:
            store.put(load_curve(DEMO_MODEL / "curve.json"))
        url = stack.enter_context(engine(folder, tier, memory, environment, flags))
        exporter = None
        if EXPORTER is not None:
            exporter = stack.enter_context(redis_exporter(EXPORTER, redis, folder))
        prompts: list[list[int]] = [[] for _ in range(SESSIONS)]
        yield SeenRun(url, tier, redis, memory, prompts, exporter)


@contextmanager
def engine(
    folder: Path,
    tier: LiveTier,
    memory: Stored,
    environment: dict[str, str],
    flags: tuple[str, ...],
) -> Iterator[str]:
    port = free_port()
    command = [
        *(sys.executable, "-m", "kvtier", "serve", "--model-path", str(DEMO_MODEL)),
        *("--dtype", "float32"),
        *("--host", "127.0.0.1", "--port", str(port), "--max-total-tokens", "20000"),
        *("--chunked-prefill-size", "512", "--skip-tokenizer-init", "--sleep-on-idle"),
        *("--decode-log-interval", "1"),
        *("--data-dir", str(folder / "data"), "--calibration-poll-s", "0.5"),
        *("--head-profile", str(DEMO_MODEL / "head_profile.json"), "--quality", "0.9"),
        *("--memory", str(memory.folder.parent), "--tier", tier.address),
        *("--refresh", "turn", "--refresh-by", "near-data", "--no-tier-shared-memory"),
        *("--enable-metrics", "--admin-api-key", ADMIN_KEY, *flags),
    ]
    # Only what this process starts sees it: the servers of tests take the environment as it is.
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        with serving(command, port, log=folder / "server.log") as url:
            yield url
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def redis_exporter(binary: str, redis: RedisServer, folder: Path) -> Iterator[str]:
    address = f"127.0.0.1:{free_port()}"
    command = [binary, "-redis.addr", redis.url.replace("unix:", "unix:", 1)]
    command += ["-web.listen-address", address]
    with (folder / "exporter.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        url = f"http://{address}/metrics"
        wait_for(lambda: _answers(url))
        yield url
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=SAFETY_S) as answer:
            return answer.status == 200
    except OSError:
        return False


__all__ = ["ADMIN_KEY", "SESSIONS", "Samples", "SeenRun", "samples_of", "scrape", "seen_run"]
