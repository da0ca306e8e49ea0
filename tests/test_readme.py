"""The commands of README and docs are real: every shell block is parsed and run, or proven to
exist. And the docs build without a warning."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from live_server import ask, free_port, serving
from text_models import write_llama
from waiting import SAFETY_S, wait_for

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
COMMANDS = list(
    dict.fromkeys(
        line
        for page in PAGES
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
        for line in block.strip().splitlines()
    )
)
# A model of the hub, which no test fetches: these commands run with the demo model.
HUB_MODEL = "Qwen/Qwen3-8B"


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


def serving_with(flag: str) -> list[str]:
    """Return the commands that serve with a flag that other pages do not serve with."""
    return [command for command in commands("kvtier serve") if flag in command]


def test_every_command_of_readme_and_docs_is_covered_here():
    known = (
        *("make ", "pip install ", "python -m"),
        *("kvtier calibrate ", "kvtier calibration ", "kvtier serve", "kvtier env"),
        "kvtier memory ",
        "python examples/",  # tests/examples
        *("kvtier tier --store memory+disk", "kvtier tier --store mooncake", "mooncake_master "),
    )
    assert [c for c in COMMANDS if not c.startswith(known)] == []
    assert all(commands(prefix) for prefix in known)


def test_the_readme_is_short():
    assert len(PAGES[0].read_text().split()) <= 700


@pytest.mark.parametrize("command", [c for c in COMMANDS if HUB_MODEL in c])
def test_commands_with_a_model_of_the_hub_are_those_with_the_demo_model(command):
    ours = command.replace(HUB_MODEL, "models/kvtier-demo").replace(" --enable-metrics", "")
    assert {ours, ours.replace(" --port", " --dtype float32 --port")} & set(COMMANDS)


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", PAGES[0].read_text())
    assert links
    assert [link for link in links if not (REPOSITORY / link).exists()] == []


def test_the_docs_build_without_a_warning(tmp_path):
    done = run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "glossary" / "index.html").exists()


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


@pytest.mark.parametrize(
    "command", [*commands("kvtier env"), *commands("kvtier calibration"), *commands("python -m")]
)
def test_quick_commands_run_as_written(command, tmp_path, monkeypatch):
    monkeypatch.setenv("KVTIER_DATA_DIR", str(tmp_path))
    done = run(in_this_environment(command))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.engine
def test_calibrating_and_serving_work_as_written(tmp_path, monkeypatch):
    """The commands that find a head profile and its curve, then the serve command that picks both
    up from the store, answering one request."""
    monkeypatch.setenv("KVTIER_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "models").symlink_to(REPOSITORY / "models")
    (calibrate,) = commands("kvtier calibrate --model-path models/kvtier-demo --len")
    (serve,) = serving_with("--quality")
    done = run(in_this_environment(calibrate), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    files = {path.name for path in (tmp_path / "data").rglob("*") if path.is_file()}
    assert {"head_profile.json", "head_profile.png", "curve.json", "curve.png"} <= files
    (listing,) = commands("kvtier calibration list")
    listed = run(in_this_environment(listing), cwd=tmp_path).stdout
    assert "kvtier:v1:profile:kvtier-demo:" in listed
    assert "kvtier:v1:curve:kvtier-demo:" in listed
    state = ask_once(serve, tmp_path, "river along")
    assert state["retention"]["calibration"]["changes"] >= 1, "the curve was not picked up"
    assert "3 of 12 KV heads context-anchored" in (tmp_path / "server.log").read_text()


@pytest.mark.engine
def test_fitting_tokens_and_letting_heads_compete_work_as_written(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTIER_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "models").symlink_to(REPOSITORY / "models")
    (fit,) = commands("kvtier calibrate --model-path models/kvtier-demo --parts tokens")
    (serve,) = commands("kvtier serve --model-path models/kvtier-demo --dtype float32 --port")
    done = run(in_this_environment(fit), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "of the best entries" in done.stdout
    state = ask_once(serve, tmp_path, " ".join(["river along stone"] * 200))
    assert state["retention"]["scorer"]["name"] == "reconstruction"
    assert state["compacted_tokens"] > 100


@pytest.mark.engine
def test_serving_with_fp8_kv_works_as_written(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTIER_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "models").symlink_to(REPOSITORY / "models")
    (serve,) = serving_with("fp8_e4m3")
    state = ask_once(serve, tmp_path, " ".join(["river along stone"] * 200))
    assert state["compacted_tokens"] > 100
    # A byte a number, a score of each head beside it, and a pool of whole slots.
    shape = json.loads((REPOSITORY / "models" / "kvtier-demo" / "config.json").read_text())
    heads = shape["num_hidden_layers"] * shape["num_key_value_heads"]
    dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    assert state["kv_capacity_bytes"] / state["slots"] < 2 * dim * heads + 4 * (heads + 1) + 8


@pytest.mark.engine
def test_prefix_memories_are_built_measured_served_and_published_as_written(tmp_path, monkeypatch):
    """The model is random, and its memory says nothing worth serving: its card is told to allow
    it."""
    monkeypatch.setenv("KVTIER_DATA_DIR", str(tmp_path / "data"))
    write_llama(tmp_path / "out" / "smollm2")
    prefix = "Letters are put into boxes, by their first word. " * 12
    (tmp_path / "prefix.txt").write_text(prefix)
    traces = [{"prompt": f"\nWhere is letter {n}? ", "answer": f"Box {n % 3}."} for n in range(24)]
    (tmp_path / "traces.jsonl").write_text("\n".join(map(json.dumps, traces)))
    build, show, verify, publish, listing, withdraw = commands("kvtier memory ")
    serve, serve_published = serving_with("--memory")
    built = run(in_this_environment(build), cwd=tmp_path)
    assert built.returncode in (0, 1), built.stderr
    shown = run(in_this_environment(show), cwd=tmp_path)
    assert shown.stdout == built.stdout
    verified = run(in_this_environment(verify), cwd=tmp_path)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    card = tmp_path / "memories" / "tools" / "memory.json"
    fields = json.loads(card.read_text())
    assert (built.returncode == 1) == bool(fields["refusals"])
    card.write_text(json.dumps(fields | {"refusals": []}))
    state = ask_once(serve + " --dtype float32", tmp_path, prefix + traces[0]["prompt"])
    assert state["memories"]["lookups"] > 0
    assert run(in_this_environment(publish), cwd=tmp_path).returncode == 0
    assert " tools " in run(in_this_environment(listing), cwd=tmp_path).stdout
    state = ask_once(serve_published + " --dtype float32", tmp_path, prefix + traces[0]["prompt"])
    assert state["memories"]["lookups"] > 0
    assert ":tools " in run(in_this_environment(withdraw), cwd=tmp_path).stdout


@pytest.mark.engine
def test_serving_with_a_tier_works_as_written(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTIER_DATA_DIR", str(tmp_path / "data"))
    # Exactly as users start it: see tests/forking.
    monkeypatch.setenv("TESTS_SPAWN", "1")
    (tmp_path / "models").symlink_to(REPOSITORY / "models")
    (tier,), (serve,) = commands("kvtier tier --store memory+disk"), serving_with("--tier ")
    # Short, because a socket's path may not be long.
    runtime = tempfile.mkdtemp(prefix="kvt")
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    with subprocess.Popen(
        in_this_environment(tier), stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as service:
        try:
            assert service.stdout is not None
            assert f"unix:{runtime}/kvtier/tier.sock" in service.stdout.readline()
            served = re.sub(r"--tier \S+", "--tier default", serve)
            text = " ".join(["river along stone"] * 200)
            state = ask_once(served, tmp_path, text)
        finally:
            service.terminate()
        assert service.wait(SAFETY_S) == 0
    shutil.rmtree(runtime)
    assert state["tier"]["healthy"]
    assert state["tier"]["put"] > 0


def ask_once(command: str, folder: Path, text: str) -> dict:
    """Serve as the command says, but on a free port and with a small pool, as other tests that run
    beside this want memory, too; the server's kvtier state after one answer."""
    port = free_port()
    arguments = in_this_environment(command.replace("30000", str(port)))
    arguments += ["--max-total-tokens", "100000"]
    with serving(arguments, port, log=folder / "server.log", cwd=folder) as url:
        status, answer = ask(
            f"{url}/generate", {"text": text, "sampling_params": {"max_new_tokens": 2}}
        )
        assert status == 200, answer
        assert json.loads(answer)["meta_info"]["completion_tokens"] == 2

        def stored() -> dict | None:
            state = json.loads(ask(f"{url}/server_info")[1])["internal_states"][0]["kvtier"]
            return None if state.get("tier", {}).get("pending") else state

        return wait_for(stored)
