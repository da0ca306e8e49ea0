"""Conversations of both example agents with a live server that runs kvtier."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import free_port, serving
from waiting import SAFETY_S

from kvtier.heads.model.config import model_shape, read_config
from kvtier.heads.profile import full_profile

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "kvtier-demo"
PROFILE = MODEL / "head_profile.json"
AGENT_TIMEOUT_S = 300

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
]


def server_command(port: int, profile: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "kvtier", "serve", "--model-path", str(MODEL)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        # The agents' own imports take long, and an idle server would poll all the while.
        *("--max-total-tokens", "16384", "--sleep-on-idle", "--head-profile", str(profile)),
    ]


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server on a free loopback port; stopped with everything it started."""
    folder = tmp_path_factory.mktemp("server")
    profile = PROFILE
    if not profile.is_file():  # nothing calibrated yet: keep every head
        profile = folder / "all_heads.json"
        full_profile(model_shape(read_config(str(MODEL)))).save(profile)
    port = free_port()
    with serving(server_command(port, profile), port, log=folder / "server.log") as url:
        yield url


@pytest.mark.parametrize("agent", ["agent_frontend.py", "agent_openai.py"])
def test_an_agent_opens_every_vault(agent: str, server_url: str):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / agent), "--url", server_url],
        capture_output=True,
        text=True,
        timeout=SAFETY_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("assistant:") == 5
    assert done.stdout.count("tool: open, and empty") == 3


@pytest.mark.parametrize("agent", ["agent_frontend.py", "agent_openai.py"])
def test_an_agent_whose_tool_call_fails_exits_with_1(agent: str, server_url: str, tmp_path: Path):
    """The codes that open the vaults are not those of the manual."""
    script = tmp_path / "changed_locks.py"
    script.write_text(
        f"import runpy, sys\nsys.path.insert(0, {str(ROOT / 'examples')!r})\n"
        "import vault\nstory = vault.write_story\n"
        "def changed(*given):\n    told = story(*given)\n"
        "    told.vaults.codes = {name: 'k00' for name in told.vaults.codes}\n    return told\n"
        "vault.write_story = changed\n"
        f"runpy.run_path({str(ROOT / 'examples' / agent)!r}, run_name='__main__')\n"
    )
    command = [sys.executable, str(script), "--url", server_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SAFETY_S)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "does not open it" in done.stdout
