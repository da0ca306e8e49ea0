"""An engine and its tier change to certificates of a new authority: the engine is not restarted."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from demo_server import DemoServer, demo_server
from sessions import tokens
from tierd.certificates import Authority, replaced
from tierd.live_tier import live_tier
from tiered_engine import RULE, as_flags
from waiting import SAFETY_S, wait_for

from kvtier.errors import TierUnavailableError
from kvtier.tier.client import TierClient, TlsPaths

pytestmark = pytest.mark.engine

NAMESPACE = "ada"
PROMPT_TOKENS = 2000
# Whole spans of a prompt, less the token that is always computed.
STORED_TOKENS = 1984


def issue(folder: Path, authority: Authority, common_name: str) -> TlsPaths:
    """Files of one end, all three of this authority."""
    folder.mkdir(exist_ok=True)
    paths = TlsPaths(folder / "ca.pem", folder / "own.pem", folder / "own.key")
    contents = (authority.pem, *authority.issue(common_name))
    for path, content in zip((paths.ca, paths.certificate, paths.key), contents, strict=True):
        replaced(path, content)
    return paths


def ask(server: DemoServer, prompt: list[int]) -> tuple[list[int], int]:
    """Ask a server that holds nothing on its device, and return the answer, and how many tokens of
    the prompt were not computed."""
    server.flush()
    answer = server.generate(prompt, 4)
    return answer["output_ids"], answer["meta_info"]["cached_tokens"]


def has_stored(server: DemoServer) -> bool:
    tier = server.state()["tier"]
    return tier["healthy"] and not tier["pending"]


def restores(server: DemoServer, prompt: list[int], answer: list[int]) -> bool:
    """Return whether the tier had the prompt."""
    tokens, cached = ask(server, prompt)
    assert tokens == answer
    return cached == STORED_TOKENS


def flags_of(address: str, tls: TlsPaths) -> list[str]:
    return [
        *("--skip-tokenizer-init", "--max-total-tokens", "8000", *as_flags(RULE)),
        *("--tier-patience-s", "600", "--tier-timeout-s", "60"),
        *("--tier", address, "--tier-namespace", NAMESPACE, "--tier-ca", str(tls.ca)),
        *("--tier-certificate", str(tls.certificate), "--tier-key", str(tls.key)),
    ]


def test_an_engine_goes_on_with_certificates_of_a_new_authority(tmp_path):
    rng = random.Random(2)
    before, between, after = (tokens(rng, PROMPT_TOKENS) for _ in "123")
    old, new = Authority(), Authority()
    of_tier = issue(tmp_path / "tier", old, "tier")
    of_engine = issue(tmp_path / "engine", old, NAMESPACE)
    flags = (
        *("--store", "disk", "--disk-path", str(tmp_path / "disk"), "--disk", "256m"),
        *("--certificate", str(of_tier.certificate), "--key", str(of_tier.key)),
        *("--client-ca", str(of_tier.ca)),
    )
    with (
        live_tier(tmp_path, *flags) as tier,
        demo_server(tmp_path, *flags_of(tier.address, of_engine)) as engine,
    ):
        answer, cached = ask(engine, before)
        assert cached == 0
        wait_for(lambda: has_stored(engine))
        wait_for(lambda: restores(engine, before, answer))

        tier.terminate()
        issue(tmp_path / "tier", new, "tier")
        tier.start()
        assert ask(engine, between)[1] == 0
        wait_for(lambda: not engine.state()["tier"]["healthy"])
        # The tier is not to blame: who has the new certificates finds it well, and only he.
        renewed = issue(tmp_path / "renewed", new, NAMESPACE)
        with TierClient(tier.address, NAMESPACE, timeout_s=SAFETY_S, tls=renewed) as client:
            client.connect()
        refused = pytest.raises(TierUnavailableError)
        outdated = TierClient(tier.address, NAMESPACE, timeout_s=SAFETY_S, tls=of_engine)
        with outdated as client, refused:
            client.connect()

        issue(tmp_path / "engine", new, NAMESPACE)
        wait_for(lambda: has_stored(engine))
        # The tier gives what it had before, and takes what comes to it now.
        wait_for(lambda: restores(engine, before, answer))
        newest, cached = ask(engine, after)
        assert cached == 0
        wait_for(lambda: has_stored(engine))
        wait_for(lambda: restores(engine, after, newest))
        assert engine.state()["tier"]["healthy"]
