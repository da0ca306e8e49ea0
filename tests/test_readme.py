"""The README's commands are real: every shell block is parsed and run, or proven to exist."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from live_server import free_port, serving

REPOSITORY = Path(__file__).resolve().parents[1]
README = (REPOSITORY / "README.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.strip().splitlines()
]


def run(arguments: list[str], cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, check=False)


def in_this_environment(command: str) -> list[str]:
    """`kvtier …` and `python …` with the interpreter that runs the tests."""
    words = shlex.split(command)
    if words[0] == "kvtier":
        return [sys.executable, "-m", "kvtier", *words[1:]]
    assert words[0] == "python"
    return [sys.executable, *words[1:]]


def commands(prefix: str) -> list[str]:
    return [command for command in COMMANDS if command.startswith(prefix)]


def test_every_command_of_the_readme_is_covered_here():
    known = ("make ", "pip install ", "kvtier calibrate", "kvtier serve", "kvtier env", "python -m")
    assert [c for c in COMMANDS if not c.startswith(known)] == []
    assert all(commands(prefix) for prefix in known)


@pytest.mark.parametrize("command", commands("make "))
def test_make_targets_exist(command):
    done = run([*shlex.split(command), "--dry-run"])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", commands("pip install "))
def test_the_extras_exist(command):
    import tomllib

    extras = re.search(r"\[(.*)\]", command)[1].split(",")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert set(extras) <= set(project["optional-dependencies"])


@pytest.mark.parametrize("command", [*commands("kvtier env"), *commands("python -m")])
def test_quick_commands_run_as_written(command):
    done = run(in_this_environment(command))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.engine
def test_calibrating_and_serving_work_as_written(tmp_path):
    """The calibrate command, then the serve command with its profile, answering one request."""
    (tmp_path / "models").symlink_to(REPOSITORY / "models")
    (calibrate,), (serve,) = commands("kvtier calibrate"), commands("kvtier serve")
    done = run(in_this_environment(calibrate), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "heads.json").is_file()
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")
    port = free_port()
    arguments = in_this_environment(serve.replace("30000", str(port)))
    with serving(arguments, port, log=tmp_path / "server.log", cwd=tmp_path) as url:
        body = json.dumps({"text": "river along", "sampling_params": {"max_new_tokens": 2}})
        request = Request(f"{url}/generate", body.encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as reply:
            assert json.load(reply)["meta_info"]["completion_tokens"] == 2
