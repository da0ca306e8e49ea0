"""A server that computes turns a second time over exact KV counts what its answers lose, and its
clients see nothing of that."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from demo_server import DemoServer, demo_server
from sessions import Prompt, tokens
from waiting import wait_for

pytestmark = pytest.mark.engine

FIRST, SECOND, ANSWER = 600, 40, 8
COMPARED = "kvtier_shadow_turns_total compared"


def server(folder: Path, *flags: str) -> AbstractContextManager[DemoServer]:
    return demo_server(folder, "--enable-metrics", "--max-total-tokens", "8000", *flags)


def counted(server: DemoServer) -> dict[str, float]:
    """The shadow's metrics, by name and outcome."""
    return {k: v for k, v in server.samples().items() if k.startswith("kvtier_shadow_")}


def session(seed: int) -> tuple[Prompt, Prompt]:
    rng = random.Random(seed)
    return tokens(rng, FIRST), tokens(rng, SECOND)


def two_turns(server: DemoServer, seed: int) -> list[dict[str, Any]]:
    first, second = session(seed)
    one = server.generate(first, ANSWER)
    return [one, server.generate([*first, *one["output_ids"], *second], ANSWER)]


def compared(server: DemoServer, before: dict[str, float], turns: int) -> dict[str, float]:
    """Wait for so many turns more and return what they add to the metrics."""
    wait_for(lambda: counted(server).get(COMPARED, 0) >= before[COMPARED] + turns)
    return {name: n - before[name] for name, n in counted(server).items() if name in before}


def warmed_up(server: DemoServer) -> dict[str, float]:
    """The metrics when the server's own first request is compared."""
    wait_for(lambda: counted(server).get(COMPARED, 0) == 1)
    return counted(server)


def agreement(found: dict[str, float]) -> float:
    name = "kvtier_shadow_{}_total"
    return found[name.format("agreeing_tokens")] / found[name.format("tokens")]


def test_what_keeps_everything_agrees_with_exact_kv(tmp_path):
    with server(tmp_path, "--shadow-share", "1") as started:
        before = warmed_up(started)
        asked = [started.generate(session(seed)[0], ANSWER) for seed in range(2)]
        found = compared(started, before, 2)
        shadow = json.loads(started.get("/kvtier/status.json"))["shadow"]
        shown = started.get("/kvtier/status")
    assert shadow["same"] == shadow["tokens"] > 2 * ANSWER
    assert f"it agrees with 100.0% of the {shadow['tokens']} tokens of their answers" in shown
    assert found["kvtier_shadow_tokens_total"] == 2 * ANSWER
    assert agreement(found) == 1
    assert found["kvtier_shadow_divergence_nats_sum"] == pytest.approx(0, abs=1e-3)
    # Nobody asked for log-probabilities.
    for one in asked:
        assert not any("logprob" in name for name in one["meta_info"])


def test_what_drops_most_is_told_apart_and_answers_as_without_a_shadow(tmp_path):
    """Under load, where requests come while others are computed again, which stop and begin anew,
    every turn is compared or given up, and no answer is missing."""
    flags, turns = ("--retention", "0.02"), 12
    (tmp_path / "plain").mkdir()
    with server(tmp_path / "plain", *flags) as started:
        plain = [two_turns(started, seed) for seed in range(2)]
        assert counted(started) == {}
    with server(tmp_path, *flags, "--shadow-share", "1") as started:
        said, before = [], warmed_up(started)
        for seed in range(2):
            said.append(two_turns(started, seed))
            compared(started, before, 2 * (seed + 1))
        # A client's own wish for log-probabilities is served as it asked.
        told = started.generate(session(7)[0], ANSWER, return_logprob=True)["meta_info"]
        found = compared(started, before, 5)
        prompts = [session(100 + number)[0] for number in range(turns)]
        with ThreadPoolExecutor(3) as clients:
            answers = list(clients.map(lambda one: started.generate(one, ANSWER), prompts))

        def ended() -> float:
            return sum(n for name, n in counted(started).items() if "turns_total" in name)

        wait_for(lambda: ended() == 1 + 5 + turns)
        assert counted(started)[COMPARED] > 1 + 5
    assert [len(one["output_ids"]) for one in answers] == [ANSWER] * turns
    assert [[one["output_ids"] for one in turns] for turns in said] == [
        [one["output_ids"] for one in turns] for turns in plain
    ]
    assert len(told["output_token_logprobs"]) == ANSWER
    assert not told.get("output_top_logprobs")
    assert found["kvtier_shadow_tokens_total"] == 5 * ANSWER
    assert agreement(found) < 1
    # It takes what it says for likelier than it is.
    assert found["kvtier_shadow_divergence_nats_sum"] > 0.01
