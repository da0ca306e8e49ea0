"""Every example agent of docs/agents.md, as written there, with a live server that runs kvtier."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import free_port, serving
from sglang_versions import needs_response_templates
from waiting import SAFETY_S

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs" / "agents.md").read_text()
(SERVE,) = re.findall(r"^kvtier (serve .*)$", PAGE, re.MULTILINE)
AGENTS = dict(re.findall(r"^python examples/(\w+)\.py (.*)$", PAGE, re.MULTILINE))
TRANSCRIPT, COSTS = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
URL = "http://127.0.0.1:30000"
# So much of another's prompt an agent may compute again before its own question and note.
OWN_TOKENS = 100

pytestmark = [pytest.mark.engine, pytest.mark.slow, needs_response_templates]


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server as the page says, on a free loopback port and with a small pool."""
    folder = tmp_path_factory.mktemp("server")
    port = free_port()
    command = [sys.executable, "-m", "kvtier", *shlex.split(SERVE.replace("30000", str(port)))]
    # The agents' own imports take long, and an idle server would poll all the while.
    command += ["--host", "127.0.0.1", "--max-total-tokens", "32768", "--sleep-on-idle"]
    with serving(command, port, log=folder / "server.log", cwd=ROOT) as url:
        yield url


def run_agent(script: Path, options: str, url: str) -> subprocess.CompletedProcess[str]:
    assert URL in options
    command = [sys.executable, str(script), *shlex.split(options.replace(URL, url))]
    return subprocess.run(command, capture_output=True, text=True, timeout=SAFETY_S)


def test_the_page_runs_every_example():
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert set(AGENTS) == scripts - {"vault", "vault_mcp"}


def test_codes_of_notes_are_nowhere_in_the_manual(monkeypatch: pytest.MonkeyPatch):
    """An agent that opens a vault by a note's codes has read the note."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import vault

    story = vault.write_story(7, 1000)
    codes = list(story.vaults.codes.values())
    assert [c in story.manual for c in codes] == [True, True, True, False, False]
    noted = [c in text for c, text in zip(codes[3:], story.vaults.contents.values(), strict=False)]
    assert noted == [True, True]


@pytest.mark.parametrize("agent", sorted(set(AGENTS) - {"subagents"}))
def test_an_agent_opens_every_vault(agent: str, server_url: str):
    done = run_agent(EXAMPLES / f"{agent}.py", AGENTS[agent], server_url)
    assert done.returncode == 0, done.stdout + done.stderr
    # The frontend language has no tools: what they found is told by the user there.
    expected = TRANSCRIPT if agent != "agent_frontend" else told_by_user(TRANSCRIPT)
    assert done.stdout == expected


def told_by_user(transcript: str) -> str:
    return re.sub(r"^     tool: (?!empty)", "     user: ", transcript, flags=re.MULTILINE)


def test_a_streamed_call_is_the_call(server_url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import vault
    from openai import OpenAI

    story = vault.write_story(0, 2048)
    asked = [
        {"role": "system", "content": story.manual},
        {"role": "user", "content": story.questions[0]},
    ]
    with (
        OpenAI(base_url=f"{server_url}/v1", api_key="none") as client,
        client.chat.completions.stream(
            model=vault.MODEL,
            messages=asked,
            tools=[{"type": "function", "function": vault.FUNCTION}],
            temperature=0,
            max_tokens=vault.MAX_ANSWER_TOKENS,
        ) as stream,
    ):
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert call.function.name == vault.TOOL
    name, codes = next(iter(story.vaults.codes.items()))
    assert json.loads(call.function.arguments) == {"vault": name, "codes": codes}


def test_subagents_and_a_branch_compute_only_what_is_their_own(server_url: str):
    done = run_agent(EXAMPLES / "subagents.py", AGENTS["subagents"], server_url)
    assert done.returncode == 0, done.stdout + done.stderr
    names, cached, computed, opened = costs(done.stdout)
    assert (names, opened) == costs(COSTS)[::3]
    assert names == ["coordinator", "coordinator", "subagent 1", "subagent 2", "branch"]
    # Nobody had this manual before, and nobody computes it after the coordinator.
    assert cached[0] < OWN_TOKENS
    assert all(own <= OWN_TOKENS for own in computed[1:])
    assert sum(computed) < computed[0] + 4 * OWN_TOKENS < sum(cached)
    # The branch has the manual from the cache and what the coordinator read in it.
    assert cached[4] > max(cached[2:4])


def costs(output: str) -> tuple[list[str], list[int], list[int], list[str]]:
    """Name, cached and computed tokens, and vault of each line."""
    lines = [
        re.fullmatch(r" *(.*): +(\d+) cached +(\d+) computed, opened (.*)", line).groups()
        for line in output.splitlines()
    ]
    names, cached, computed, opened = map(list, zip(*lines, strict=True))
    return names, [int(n) for n in cached], [int(n) for n in computed], opened


@pytest.mark.parametrize("agent", sorted(AGENTS))
def test_an_agent_whose_tool_call_fails_exits_with_1(agent: str, server_url: str, tmp_path: Path):
    """The manual has other codes than those that open the vaults."""
    script = tmp_path / "changed_manual.py"
    script.write_text(
        f"import runpy, sys\nsys.path.insert(0, {str(EXAMPLES)!r})\n"
        "import vault\nstory = vault.write_story\n"
        "def changed(*given):\n    told = story(*given)\n"
        "    for codes in told.vaults.codes.values():\n"
        "        turned = ' '.join(reversed(codes.split()))\n"
        "        told.manual = told.manual.replace(codes, turned)\n"
        "    return told\n"
        "vault.write_story = changed\n"
        f"runpy.run_path({str(EXAMPLES / f'{agent}.py')!r}, run_name='__main__')\n"
    )
    done = run_agent(script, AGENTS[agent], server_url)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "does not open it" in done.stdout
