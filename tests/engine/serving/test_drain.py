"""A server that is asked to end while its tier is slow: its newest turn is there afterwards."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from urllib.request import Request, urlopen

import pytest
from engine_process import DEMO_MODEL, run_engine
from live_server import free_port, stop, wait_until_healthy
from tierd.live_tier import live_tier
from waiting import SAFETY_S, wait_for

pytestmark = pytest.mark.engine

SETTINGS = {
    "locality-sink-tokens": "32",
    "locality-recent-tokens": "64",
    "locality-branch-recent-tokens": "24",
    "tier-span-tokens": "64",
    "head-profile": str(DEMO_MODEL / "head_profile.json"),
}


def test_the_newest_turn_reaches_the_tier_before_the_server_ends(tmp_path):
    prompt = [random.Random(1).randrange(6, 384) for _ in range(600)]
    with live_tier(tmp_path, "--memory", "256m") as tier:
        answer = ask_and_end(tmp_path, prompt, tier)
        engine = {
            **{"model_path": str(DEMO_MODEL), "max_total_tokens": 8000},
            **{"attention_backend": "kvtier", "radix_cache_backend": "kvtier"},
        }
        env = {f"KVTIER_{name.upper().replace('-', '_')}": v for name, v in SETTINGS.items()}
        again = {"input_ids": [*prompt, *answer, 7, 8, 9], "max_new_tokens": 1}
        out = run_engine(tmp_path, engine, [[again]], {**env, "KVTIER_TIER": tier.address})
    # The last token of an answer has no KV yet.
    assert out["rounds"][0][0]["cached_tokens"] == len(prompt) + len(answer) - 1


def ask_and_end(folder, prompt: list[int], tier) -> list[int]:
    """One answer of a server whose tier stands still from before it until after SIGTERM."""
    port = free_port()
    flags = [text for name, value in SETTINGS.items() for text in (f"--{name}", value)]
    command = [
        *(sys.executable, "-m", "kvtier", "serve", "--model-path", str(DEMO_MODEL)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--max-total-tokens", "8000", "--data-dir", str(folder / "data")),
        *("--skip-tokenizer-init", "--sleep-on-idle", "--tier", tier.address, *flags),
        *("--tier-drain-s", "12"),
    ]
    log = folder / "server.log"
    with log.open("wb") as stream:
        server = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, server, log)
        tier.pause()
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
        head = {"Content-Type": "application/json"}
        with urlopen(
            Request(f"{url}/generate", json.dumps(body).encode(), head), timeout=SAFETY_S
        ) as r:
            answer = json.load(r)["output_ids"]
        server.terminate()
        wait_for(lambda: "calls to the tier are waited for" in log.read_text())
        assert server.poll() is None
        tier.resume()
        server.wait(SAFETY_S)
    finally:
        tier.resume()
        stop(server)
    return answer
