"""A server that is asked to end while its tier is slow: its newest turn is there afterwards, and
a request that comes too late is refused."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection

import pytest
from engine_process import DEMO_MODEL, run_engine
from live_server import free_port, stop, wait_until_healthy
from tierd.live_tier import live_tier
from tiered_engine import RULE, as_flags
from waiting import SAFETY_S, wait_for

pytestmark = pytest.mark.engine


def test_the_newest_turn_reaches_the_tier_before_the_server_ends(tmp_path):
    prompt = [random.Random(1).randrange(6, 384) for _ in range(600)]
    with live_tier(tmp_path, "--memory", "256m") as tier:
        answer = ask_and_end(tmp_path, prompt, tier)
        engine = {
            **{"model_path": str(DEMO_MODEL), "max_total_tokens": 8000},
            **{"attention_backend": "kvtier", "radix_cache_backend": "kvtier"},
        }
        again = {"input_ids": [*prompt, *answer, 7, 8, 9], "max_new_tokens": 1}
        out = run_engine(tmp_path, engine, [[again]], {**RULE, "KVTIER_TIER": tier.address})
    # The last token of an answer has no KV yet.
    assert out["rounds"][0][0]["cached_tokens"] == len(prompt) + len(answer) - 1


def ask_and_end(folder, prompt: list[int], tier) -> list[int]:
    """One answer of a server whose tier stands still from before it until after SIGTERM.

    Its connection is kept, as a router keeps it: what is asked there while the server ends is
    refused, or it would wait for an answer that nobody gives, and the server for that.
    """
    port = free_port()
    command = [
        *(sys.executable, "-m", "kvtier", "serve", "--model-path", str(DEMO_MODEL)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--max-total-tokens", "8000", "--data-dir", str(folder / "data")),
        *("--skip-tokenizer-init", "--sleep-on-idle", "--tier", tier.address),
        *("--tier-drain-s", "12", *as_flags(RULE)),
    ]
    log = folder / "server.log"
    environment = os.environ | {"SGLANG_TIMEOUT_KEEP_ALIVE": "600"}
    with log.open("wb") as stream:
        server = subprocess.Popen(
            command, stdout=stream, stderr=stream, start_new_session=True, env=environment
        )
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}", server, log)
        tier.pause()
        with closing(HTTPConnection("127.0.0.1", port, timeout=SAFETY_S)) as kept:
            ask(kept, prompt)
            answer = json.loads(kept.getresponse().read())["output_ids"]
            server.terminate()
            wait_for(lambda: "calls to the tier are waited for" in log.read_text())
            assert server.poll() is None
            ask(kept, prompt, stream=True)
            tier.resume()
            refused = kept.getresponse()
            refused.read()
        server.wait(SAFETY_S)
    finally:
        tier.resume()
        stop(server)
    assert refused.status == HTTPStatus.SERVICE_UNAVAILABLE
    return answer


def ask(connection: HTTPConnection, prompt: list[int], *, stream: bool = False) -> None:
    sampling = {"max_new_tokens": 4, "temperature": 0}
    body = json.dumps({"input_ids": prompt, "sampling_params": sampling, "stream": stream})
    connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
