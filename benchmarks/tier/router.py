"""Two servers behind SGLang's router, over one tier: sessions stay where they are, and when a
server dies its sessions go on at the other, restored.

    python -m benchmarks.tier.router --smg VENV/bin/smg

The router (`pip install smg`, in an environment of its own) places a session by a header. Sessions
hold their turns through it; then one server is killed, and every session holds another turn.

    kept in place    later turns whose context the server still had on the device
    moved            turns of the killed server's sessions at the other one: the context comes from
                     the tier, beside what computing it took when it was new
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.common.bars import Bar
from benchmarks.common.benchmark import RESULTS, Arguments, Benchmark, Measured, Options
from benchmarks.common.recall_arguments import add_model
from benchmarks.common.table import new_table, show
from benchmarks.soak.processes import Served, answers_http, server_process, tier_process
from benchmarks.tier.faults.processes import free_address
from kvtier.sizes import format_size

HEADER = "x-session-id"
IDS = (6, 384)
TURN_TOKENS, ANSWER_TOKENS = 40, 8
TIMEOUT_S = 300


def declare(arguments: Arguments) -> None:
    add_model(arguments, "head_profile.json")
    arguments.add("--smg", required=True, metavar="FILE", help="the router's program")
    arguments.size("--len", "4k", "context tokens of a session")
    arguments.whole("--sessions", 8, "sessions", least=2)
    arguments.whole("--turns", 3, "turns of each before a server is killed", least=2)


class Session:
    """A conversation through the router. name: what the header says."""

    def __init__(self, name: str, url: str, chance: random.Random) -> None:
        self.name, self.url, self._chance = name, url, chance
        self.history: list[int] = []

    def turn(self, tokens: int) -> dict[str, Any]:
        """Ask `tokens` new tokens: the time until the first comes back, and what was cached."""
        self.history += [self._chance.randrange(*IDS) for _ in range(tokens)]
        sampling = {"max_new_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": self.history, "sampling_params": sampling, "stream": True}
        headers = {"Content-Type": "application/json", HEADER: self.name}
        request = urllib.request.Request(f"{self.url}/generate", json.dumps(body).encode(), headers)
        began, first, last = time.perf_counter(), 0.0, b""
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as stream:
            for line in stream:
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter()
                    last = line[len(b"data: ") :]
        answer = json.loads(last)
        prompt = len(self.history)
        self.history += answer["output_ids"]
        details = answer["meta_info"].get("cached_tokens_details") or {}
        return {
            "session": self.name,
            "prompt_tokens": prompt,
            "cached_tokens": answer["meta_info"]["cached_tokens"],
            "from_tier": details.get("storage", 0),
            "ttft_ms": 1000 * (first - began),
        }


def run(options: Options) -> Measured:
    with tempfile.TemporaryDirectory(prefix="kvtier-router-") as name:
        folder = Path(name)
        started: list[Served] = []
        try:
            return measure(options, folder, started)
        finally:
            for served in reversed(started):
                served.kill()


def measure(options: Options, folder: Path, started: list[Served]) -> Measured:
    """started: gets every process, in order."""
    tier, address = tier_process(folder, "1g", "1g")
    flags = [
        "--model-path", str(options.model_path), "--dtype", "float32", "--device", "cpu",
        "--attention-backend", "kvtier", "--radix-cache-backend", "kvtier",
        "--head-profile", str(options.model_path / "head_profile.json"),
        "--max-total-tokens", str(2 * options.sessions * (options.len + 1024)),
        "--tier", address, "--log-level", "warning", "--skip-server-warmup",
        "--chunked-prefill-size", "2048",
    ]  # fmt: skip
    servers = [server_process(f"server-{i}", ("kvtier", "serve"), flags, folder) for i in range(2)]
    host, port = free_address().split(":")
    url = f"http://{host}:{port}"
    command = [
        options.smg, "launch", "--host", host, "--port", port,
        "--worker-urls", *(url for _, url in servers),
        "--policy", "consistent_hashing", "--routing-key-headers", HEADER,
        "--health-check-interval-secs", "2", "--health-failure-threshold", "1",
    ]  # fmt: skip
    router = Served("router", command, folder, answers_http(url))
    started.append(tier)
    tier.start()
    for server, _ in servers:
        started.append(server)
        server.launch()
    for server, _ in servers:
        server.wait_ready()
    started.append(router)
    router.start()
    chance = random.Random(options.seed)
    sessions = [Session(f"session-{i}", url, chance) for i in range(options.sessions)]
    wait_for_workers(sessions[0])
    first = [session.turn(options.len) for session in sessions]
    later = [session.turn(TURN_TOKENS) for _ in range(options.turns - 1) for session in sessions]
    time.sleep(2)  # the last turns reach the tier
    servers[0][0].kill()
    after = []
    for session in sessions:
        after.append(retried(session))
    return judged(options, first, later, after)


def wait_for_workers(session: Session) -> None:
    """The router answers before it knows its workers."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            session.turn(4)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
        else:
            session.history.clear()
            return


def retried(session: Session) -> dict[str, Any]:
    """A turn whose first try may go to the server that was killed, as clients would try again."""
    history, tries = list(session.history), 0
    while True:
        tries += 1
        try:
            return session.turn(TURN_TOKENS) | {"tries": tries}
        except OSError:
            if tries > 20:
                raise
            session.history = list(history)
            time.sleep(0.5)


def judged(
    options: Options,
    first: list[dict[str, Any]],
    later: list[dict[str, Any]],
    after: list[dict[str, Any]],
) -> Measured:
    computed = statistics.median(one["ttft_ms"] for one in first)
    stayed = [one for one in later if one["cached_tokens"] and not one["from_tier"]]
    moved = [one for one in after if one["from_tier"]]
    held = [one for one in after if not one["from_tier"]]
    table = new_table(
        f"{len(first)} sessions of {format_size(options.len)}, two servers, one of them killed",
        ("turns", "number", "median time to first token"),
        left=("turns",),
    )
    for label, turns in (
        ("first, computed", first),
        ("later, context on the device", stayed),
        ("after the death, session stays", held),
        ("after the death, restored elsewhere", moved),
    ):
        median = statistics.median(one["ttft_ms"] for one in turns) if turns else float("nan")
        table.add_row(label, str(len(turns)), f"{median:.0f} ms")
    show(table)
    restored = statistics.median(one["ttft_ms"] for one in moved) if moved else float("inf")
    whole = sum(one["cached_tokens"] >= options.len for one in after)
    figures = {
        "context_tokens": options.len, "sessions": len(first), "first": first, "later": later,
        "after": after, "computed_ms": computed, "restored_ms": restored,
    }  # fmt: skip
    return Measured(
        figures,
        [
            Bar("later turns in place", f"{len(stayed)} of {len(later)}", stayed == later),
            Bar(
                "sessions that moved", f"{len(moved)} of {len(after)}", 0 < len(moved) < len(after)
            ),
            Bar("contexts computed again", f"{len(after) - whole}", whole == len(after)),
            Bar(
                "restored below computed",
                f"{restored:.0f} ms against {computed:.0f} ms",
                restored < computed,
            ),
        ],
    )


BENCHMARK = Benchmark(
    "tier.router",
    __doc__,
    declare,
    run,
    out=RESULTS / "tier-router.json",
    seed=5,
    seeded="of all tokens",
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
