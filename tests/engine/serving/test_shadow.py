"""A server that computes turns a second time over exact KV counts what its answers lose, and its
clients see nothing of that."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from engine_process import DEMO_MODEL
from live_server import free_port, serving
from prometheus_client.parser import text_string_to_metric_families
from waiting import SAFETY_S, wait_for

pytestmark = pytest.mark.engine

FIRST, SECOND, ANSWER = 600, 40, 8


@contextmanager
def server(folder: Path, *flags: str) -> Iterator[str]:
    port = free_port()
    command = [
        *(sys.executable, "-m", "kvtier", "serve", "--model-path", str(DEMO_MODEL)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enable-metrics"),
        *("--max-total-tokens", "8000", "--data-dir", str(folder), *flags),
    ]
    with serving(command, port, log=folder / "server.log") as url:
        yield url


def ask(url: str, input_ids: list[int], **more: Any) -> dict[str, Any]:
    body = {
        "input_ids": input_ids,
        "sampling_params": {"max_new_tokens": ANSWER, "temperature": 0, "ignore_eos": True},
        **more,
    }
    request = Request(f"{url}/generate", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urlopen(request, timeout=SAFETY_S) as reply:
        return json.load(reply)


def counted(url: str) -> dict[str, float]:
    """The shadow's metrics, by name and outcome."""
    with urlopen(f"{url}/metrics/", timeout=SAFETY_S) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    return {
        " ".join([sample.name, *filter(None, [sample.labels.get("outcome")])]): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("kvtier_shadow_")
    }


def session(seed: int) -> tuple[list[int], list[int]]:
    rng = random.Random(seed)
    return tuple([rng.randrange(6, 384) for _ in range(n)] for n in (FIRST, SECOND))


def two_turns(url: str, seed: int) -> list[dict[str, Any]]:
    first, second = session(seed)
    one = ask(url, first)
    return [one, ask(url, [*first, *one["output_ids"], *second])]


COMPARED = "kvtier_shadow_turns_total compared"


def compared(url: str, before: dict[str, float], turns: int) -> dict[str, float]:
    """Wait for so many turns more and return what they add to the metrics."""
    wait_for(lambda: counted(url).get(COMPARED, 0) >= before[COMPARED] + turns)
    return {name: value - before[name] for name, value in counted(url).items() if name in before}


def warmed_up(url: str) -> dict[str, float]:
    """The metrics when the server's own first request is compared."""
    wait_for(lambda: counted(url).get(COMPARED, 0) == 1)
    return counted(url)


def agreement(found: dict[str, float]) -> float:
    name = "kvtier_shadow_{}_total"
    return found[name.format("agreeing_tokens")] / found[name.format("tokens")]


def test_what_keeps_everything_agrees_with_exact_kv(tmp_path):
    with server(tmp_path, "--shadow-share", "1") as url:
        before = warmed_up(url)
        asked = [ask(url, session(seed)[0]) for seed in range(2)]
        found = compared(url, before, 2)
        with urlopen(f"{url}/kvtier/status.json", timeout=SAFETY_S) as reply:
            shadow = json.load(reply)["shadow"]
        with urlopen(f"{url}/kvtier/status", timeout=SAFETY_S) as reply:
            shown = reply.read().decode()
    assert shadow["same"] == shadow["tokens"] > 2 * ANSWER
    assert f"it agrees with 100.0% of the {shadow['tokens']} tokens of their answers" in shown
    assert found["kvtier_shadow_tokens_total"] == 2 * ANSWER
    assert agreement(found) == 1
    assert found["kvtier_shadow_divergence_nats_sum"] == pytest.approx(0, abs=1e-3)
    # Nobody asked for log-probabilities.
    for one in asked:
        assert not any("logprob" in name for name in one["meta_info"])


def test_what_drops_most_is_told_apart_and_answers_as_without_a_shadow(tmp_path):
    flags = ("--retention", "0.02")
    (tmp_path / "plain").mkdir()
    with server(tmp_path / "plain", *flags) as url:
        plain = [two_turns(url, seed) for seed in range(2)]
        assert counted(url) == {}
    with server(tmp_path, *flags, "--shadow-share", "1") as url:
        said, before = [], warmed_up(url)
        for seed in range(2):
            said.append(two_turns(url, seed))
            compared(url, before, 2 * (seed + 1))
        # A client's own wish for log-probabilities is served as it asked.
        told = ask(url, session(7)[0], return_logprob=True)["meta_info"]
        found = compared(url, before, 5)
    assert [[one["output_ids"] for one in turns] for turns in said] == [
        [one["output_ids"] for one in turns] for turns in plain
    ]
    assert len(told["output_token_logprobs"]) == ANSWER
    assert not told.get("output_top_logprobs")
    assert found["kvtier_shadow_tokens_total"] == 5 * ANSWER
    assert agreement(found) < 1
    # It takes what it says for likelier than it is.
    assert found["kvtier_shadow_divergence_nats_sum"] > 0.01


def test_under_load_every_turn_is_compared_or_given_up_and_no_answer_is_missing(tmp_path):
    """Requests come while others are computed again, which stop and begin anew."""
    from concurrent.futures import ThreadPoolExecutor

    turns = 12
    with server(tmp_path, "--retention", "0.3", "--shadow-share", "1") as url:
        warmed_up(url)
        with ThreadPoolExecutor(3) as clients:
            answers = list(clients.map(lambda seed: ask(url, session(seed)[0]), range(turns)))
        assert [len(one["output_ids"]) for one in answers] == [ANSWER] * turns

        def ended() -> float:
            found = counted(url)
            return sum(value for name, value in found.items() if "turns_total" in name)

        wait_for(lambda: ended() == turns + 1)
        assert counted(url)[COMPARED] > 1
