"""An engine and its tier change to certificates of a new authority: the engine is not restarted."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from engine_process import DEMO_MODEL
from live_server import free_port, serving
from test_drain import SETTINGS
from tierd.certificates import Authority
from tierd.live_tier import live_tier
from waiting import SAFETY_S, wait_for

from kvtier.errors import TierUnavailableError
from kvtier.tier.client import TierClient, TlsPaths

pytestmark = pytest.mark.engine

NAMESPACE = "ada"
PROMPT_TOKENS = 2000
# Whole spans of a prompt, less the token that is always computed.
STORED_TOKENS = 1984


def issue(folder: Path, authority: Authority, common_name: str) -> TlsPaths:
    """Files of one end, all three of this authority; moved into place as people do."""
    folder.mkdir(exist_ok=True)
    paths = TlsPaths(folder / "ca.pem", folder / "own.pem", folder / "own.key")
    contents = (authority.pem, *authority.issue(common_name))
    for path, content in zip((paths.ca, paths.certificate, paths.key), contents, strict=True):
        new = path.with_suffix(".new")
        new.write_bytes(content)
        os.replace(new, path)
    return paths


class Engine:
    """A server at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def _answer(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data, {"Content-Type": "application/json"})
        with urlopen(request, timeout=SAFETY_S) as reply:
            return reply.read()

    def ask(self, prompt: list[int]) -> tuple[list[int], int]:
        """Ask a server that holds nothing on its device, and return the answer, and how many tokens
        of the prompt were not computed."""
        self._answer("/flush_cache", {})
        sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        answer = json.loads(self._answer("/generate", body))
        return answer["output_ids"], answer["meta_info"]["cached_tokens"]

    @property
    def tier(self) -> dict[str, Any]:
        return json.loads(self._answer("/server_info"))["internal_states"][0]["kvtier"]["tier"]

    def has_stored(self) -> bool:
        tier = self.tier
        return tier["healthy"] and not tier["pending"]

    def restores(self, prompt: list[int], answer: list[int]) -> bool:
        """Return whether the tier had the prompt."""
        tokens, cached = self.ask(prompt)
        assert tokens == answer
        return cached == STORED_TOKENS


def serve_command(port: int, address: str, tls: TlsPaths, folder: Path) -> list[str]:
    flags = SETTINGS | {
        **{"model-path": str(DEMO_MODEL), "dtype": "float32", "max-total-tokens": "8000"},
        **{"host": "127.0.0.1", "port": str(port), "data-dir": str(folder / "data")},
        **{"tier-patience-s": "600", "tier-timeout-s": "60"},
        **{"tier": address, "tier-namespace": NAMESPACE, "tier-ca": str(tls.ca)},
        **{"tier-certificate": str(tls.certificate), "tier-key": str(tls.key)},
    }
    given = [text for name, value in flags.items() for text in (f"--{name}", value)]
    return [sys.executable, "-m", "kvtier", "serve", "--skip-tokenizer-init", *given]


def test_an_engine_goes_on_with_certificates_of_a_new_authority(tmp_path):
    rng = random.Random(2)
    before, between, after = ([rng.randrange(6, 384) for _ in range(PROMPT_TOKENS)] for _ in "123")
    old, new = Authority(), Authority()
    of_tier = issue(tmp_path / "tier", old, "tier")
    of_engine = issue(tmp_path / "engine", old, NAMESPACE)
    flags = (
        *("--store", "disk", "--disk-path", str(tmp_path / "disk"), "--disk", "256m"),
        *("--certificate", str(of_tier.certificate), "--key", str(of_tier.key)),
        *("--client-ca", str(of_tier.ca)),
    )
    port = free_port()
    with live_tier(tmp_path, *flags) as tier:
        command = serve_command(port, tier.address, of_engine, tmp_path)
        with serving(command, port, log=tmp_path / "server.log") as url:
            engine = Engine(url)
            answer, cached = engine.ask(before)
            assert cached == 0
            wait_for(engine.has_stored)
            wait_for(lambda: engine.restores(before, answer))

            tier.terminate()
            issue(tmp_path / "tier", new, "tier")
            tier.start()
            assert engine.ask(between)[1] == 0
            wait_for(lambda: not engine.tier["healthy"])
            # The tier is not to blame: who has the new certificates finds it well, and only he.
            renewed = issue(tmp_path / "renewed", new, NAMESPACE)
            with TierClient(tier.address, NAMESPACE, timeout_s=SAFETY_S, tls=renewed) as client:
                client.connect()
            refused = pytest.raises(TierUnavailableError)
            outdated = TierClient(tier.address, NAMESPACE, timeout_s=SAFETY_S, tls=of_engine)
            with outdated as client, refused:
                client.connect()

            issue(tmp_path / "engine", new, NAMESPACE)
            wait_for(engine.has_stored)
            # The tier gives what it had before, and takes what comes to it now.
            wait_for(lambda: engine.restores(before, answer))
            newest, cached = engine.ask(after)
            assert cached == 0
            wait_for(engine.has_stored)
            wait_for(lambda: engine.restores(after, newest))
            assert engine.tier["healthy"]
