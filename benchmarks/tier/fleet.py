"""Servers behind SGLang's router, over one tier, and the sessions that they hold.

    session ── x-session-id ──> router ──┬── server 0 ──┐
                                         └── server 1 ──┴── tier

The router places a session by a header, and tries a request again elsewhere whose server cannot be
reached. Clients try nothing again.
"""

from __future__ import annotations

import json
import random
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import Options
from benchmarks.common.processes import (
    LOOK_S,
    ProcessError,
    Served,
    answers_http,
    free_address,
    server_process,
    tier_process,
)
from kvtier.tier.blobs.keys import SPAN_TOKENS

HEADER = "x-session-id"
IDS = (6, 384)
TURN_TOKENS, ANSWER_TOKENS = 40, 8
TIMEOUT_S = 900
# deploy/base/router has the same.
KEPT_BYTES = 16 << 20
# Tokens of room that a session has beside its context.
ROOM_TOKENS = 8192


@dataclass(frozen=True)
class Turn:
    """new_ids: what was asked; answer_ids: greedy; context_tokens: of the turns before.

    cached_tokens, from_tier: of the prompt, as the server says; ttft_ms: to the first token.
    """

    session: str
    new_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    context_tokens: int
    cached_tokens: int
    from_tier: int
    ttft_ms: float

    @property
    def computed_again(self) -> int:
        """Tokens of the turns before that were computed again. An answer's last token has no KV
        before the next turn, and less than a span is not asked for: it is computed faster."""
        missing = self.context_tokens - 1 - self.cached_tokens
        return missing if missing >= SPAN_TOKENS else 0

    def figures(self) -> dict[str, Any]:
        """Return the turn's figures for a benchmark's JSON."""
        names = ("session", "context_tokens", "cached_tokens", "from_tier", "ttft_ms")
        return {name: getattr(self, name) for name in names}


class Session:
    """A conversation with a server, or with servers behind a router. name: what the header says."""

    def __init__(self, name: str, url: str, seed: int) -> None:
        self.name, self.url, self._chance = name, url, random.Random(f"{name} {seed}")
        self.history: list[int] = []
        self.turns: list[Turn] = []

    def ask(self, tokens: int) -> Turn:
        """A turn of so many new tokens. Raises OSError where it fails; then nothing was said."""
        return self.say([self._chance.randrange(*IDS) for _ in range(tokens)])

    def say(self, new_ids: Sequence[int]) -> Turn:
        """A turn. Raises OSError where it fails."""
        context = len(self.history)
        prompt = [*self.history, *new_ids]
        sampling = {"max_new_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        headers = {"Content-Type": "application/json", HEADER: self.name}
        request = urllib.request.Request(f"{self.url}/generate", json.dumps(body).encode(), headers)
        began, first, last = time.perf_counter(), 0.0, b""
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as stream:
            for line in stream:
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter()
                    last = line[len(b"data: ") :]
        found = json.loads(last or b"{}")
        if len(found.get("output_ids", ())) != ANSWER_TOKENS:
            raise OSError(f"an answer that broke off: {found}")
        meta = found["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        turn = Turn(
            self.name,
            tuple(new_ids),
            tuple(found["output_ids"]),
            context,
            meta["cached_tokens"],
            details.get("storage", 0),
            1000 * (first - began),
        )
        self.history = [*prompt, *turn.answer_ids]
        self.turns.append(turn)
        return turn


@dataclass(frozen=True)
class Fleet:
    """url: of the router. flags: of the servers, without their tier."""

    url: str
    servers: Sequence[Served]
    folder: Path
    flags: Sequence[str]

    def sessions(self, count: int, seed: int) -> list[Session]:
        return [Session(f"session-{at}", self.url, seed) for at in range(count)]

    def undisturbed(self, sessions: Sequence[Session]) -> int:
        """Return how many turns of these sessions a server answers otherwise that has no tier, and
        to which nothing happens."""
        server, url = server_process("undisturbed", ("kvtier", "serve"), self.flags, self.folder)
        different = 0
        try:
            server.start()
            for session in sessions:
                again = Session(session.name, url, 0)
                for turn in session.turns:
                    different += again.say(turn.new_ids).answer_ids != turn.answer_ids
                    again.history[-ANSWER_TOKENS:] = turn.answer_ids
        finally:
            server.kill()
        return different

    def wait_until_routed(self) -> None:
        """Wait until the router sends requests to every server. It learns of one that has started
        by itself, some seconds after that answers."""

        def routed() -> bool:
            well = [worker for worker in self._workers() if worker["is_healthy"]]
            return len(well) == len(self.servers)

        wait_until(routed, "the router does not know all servers")

    def wait_until_stored(self) -> None:
        """Wait until nothing is on its way from any server to the tier."""

        def stored() -> bool:
            return not any(_tier_of(worker["url"])["pending"] for worker in self._workers())

        wait_until(stored, "not all KV has reached the tier")

    def _workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = _asked(f"{self.url}/workers")["workers"]
        return workers


def wait_until(fact: Callable[[], bool], otherwise: str) -> None:
    """Wait until it is true. Raises ProcessError with these words where it does not come true."""
    deadline = time.monotonic() + TIMEOUT_S
    while not fact():
        if time.monotonic() > deadline:
            raise ProcessError(otherwise)
        time.sleep(LOOK_S)


def _asked(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def _tier_of(url: str) -> dict[str, Any]:
    """Return what a server says of its tier."""
    tier: dict[str, Any] = _asked(f"{url}/server_info")["internal_states"][0]["kvtier"]["tier"]
    return tier


def reason(error: OSError) -> str:
    """Return why a request failed, with what the router answered."""
    if isinstance(error, urllib.error.HTTPError):
        return f"{error}: {error.read().decode(errors='replace')}"
    return str(error)


@contextmanager
def running_fleet(options: Options, folder: Path) -> Iterator[Fleet]:
    """Two servers, the router and the tier, until they are not needed any more."""
    tier, address = tier_process(folder, "1g", "1g")
    flags = [
        "--model-path", str(options.model_path), "--dtype", "float32", "--device", "cpu",
        "--attention-backend", "kvtier", "--radix-cache-backend", "kvtier",
        "--head-profile", str(options.model_path / "head_profile.json"),
        "--max-total-tokens", str(2 * options.sessions * (options.len + ROOM_TOKENS)),
        "--log-level", "warning", "--skip-server-warmup", "--chunked-prefill-size", "2048",
    ]  # fmt: skip
    tiered = [*flags, "--tier", address]
    if options.patience_s is not None:
        tiered += ["--tier-patience-s", str(options.patience_s)]
        tiered += ["--tier-timeout-s", str(min(60, options.patience_s))]
    servers = [server_process(f"server-{i}", ("kvtier", "serve"), tiered, folder) for i in range(2)]
    host, port = free_address().split(":")
    _, metrics_port = free_address().split(":")
    url = f"http://{host}:{port}"
    command = [
        str(Path(sys.executable).with_name("smg")), "launch", "--host", host, "--port", port,
        "--worker-urls", *(url for _, url in servers),
        "--policy", "consistent_hashing", "--routing-key-headers", HEADER,
        "--health-check-interval-secs", "1", "--health-failure-threshold", "1",
        # A server that got SIGTERM is healthy while it finishes what it has, and not ready.
        "--health-check-endpoint", "/ready",
        # Nothing is left of a larger request to try it again when its server dies.
        "--max-buffered-request-bytes", str(KEPT_BYTES),
        # Another router on this host may have the usual one.
        "--prometheus-port", metrics_port,
    ]  # fmt: skip
    router = Served("router", command, folder, partial(answers_http, url))
    started = [tier, *(server for server, _ in servers), router]
    try:
        tier.start()
        for server, _ in servers:
            server.launch()
        for server, _ in servers:
            server.wait_ready()
        router.start()
        fleet = Fleet(url, [server for server, _ in servers], folder, flags)
        fleet.wait_until_routed()
        yield fleet
    finally:
        for served in reversed(started):
            served.kill()
