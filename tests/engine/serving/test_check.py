"""`kvtier check` on conversations in which the demo model truly recalls."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_process import CLEAN_ENVIRONMENT, DEMO_MODEL
from sglang_versions import needs_response_templates
from waiting import SAFETY_S

from kvtier.errors import UsageError
from kvtier.traffic.transcripts import Turn
from kvtier_sglang.check import engines
from kvtier_sglang.check.command import main

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SESSIONS = 2
ANSWERS = 5


def conversation(seed: int) -> list[dict[str, Any]]:
    """A story of the examples as it goes where every vault is opened."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import vault
    finally:
        sys.path.remove(str(EXAMPLES))
    story = vault.write_story(seed, 1500)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": story.manual},
        {"role": "user", "content": story.questions[0]},
    ]
    for number, (name, codes) in enumerate(story.vaults.codes.items()):
        arguments = json.dumps({"vault": name, "codes": codes})
        call = {"id": f"call_{number}", "type": "function"}
        call |= {"function": {"name": vault.TOOL, "arguments": arguments}}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": story.vaults.open(name, codes),
            },
        ]
    return messages


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("recorded") / "sessions.json"
    file.write_text(json.dumps([conversation(seed) for seed in range(SESSIONS)]))
    return file


def check(folder: Path, recorded: Path, *flags: str) -> tuple[int, dict[str, Any], str]:
    """The command's exit code, its figures, and all that it printed."""
    out = folder / "check.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvtier", "check", "--model-path", str(DEMO_MODEL)),
            *("--transcripts", str(recorded), "--dtype", "float32", "--json", str(out)),
            *("--max-total-tokens", "16000", "--max-new-tokens", "12"),
            *("--tool-call-parser", "response_template"),
            *("--html", str(folder / "check.html"), *flags),
        ],
        env=CLEAN_ENVIRONMENT | {"KVTIER_DATA_DIR": str(folder), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=SAFETY_S,
    )
    printed = done.stdout + done.stderr
    assert out.is_file(), printed[-4000:]
    return done.returncode, json.loads(out.read_text()), printed


@pytest.mark.engine
@needs_response_templates
def test_what_keeps_everything_loses_nothing(tmp_path, recorded):
    code, found, printed = check(tmp_path, recorded, "--min-worth", "0.999")
    assert code == 0
    turns = found["turns"]
    assert len(turns) == SESSIONS * ANSWERS
    for one in turns:
        assert one["kept"] == pytest.approx(one["full"], abs=1e-3)
        assert one["same_tokens"] == one["said_tokens"] > 0
    figures = found["figures"]
    assert figures["turns"] == SESSIONS * (ANSWERS - 1)
    assert figures["worth"] == pytest.approx(1, abs=1e-3)
    assert figures["agreement"] == figures["answers"] == figures["calls"] == 1
    assert figures["tool_calls"] == SESSIONS * (ANSWERS - 1)
    # Recorded answers stand in the manual: without it they cannot be told.
    assert sum(one["bare"] - one["full"] for one in turns) > 20
    assert "worth kept" in printed
    assert (tmp_path / "check.html").read_text().count("<svg") == 4


@pytest.mark.engine
@needs_response_templates
def test_what_drops_most_is_told_and_fails_its_bounds(tmp_path, recorded):
    flags = ("--retention", "0.02", "--min-worth", "0.9", "--min-agreement", "0.9")
    code, found, printed = check(tmp_path, recorded, *flags)
    assert code == 1
    first = [one for one in found["turns"] if one["turn"] == 1]
    # Nothing was compressed before a session's first answer.
    for one in first:
        assert one["kept"] == pytest.approx(one["full"], abs=1e-3)
        assert one["same_answer"]
    assert found["figures"]["worth"] < 0.9
    assert found["figures"]["agreement"] < 0.9
    assert found["figures"]["calls"] < 1
    for name in ("worth", "agreement"):
        assert f"{name}: {found['figures'][name]:.3f} is below 0.9" in printed
    assert found["settings"]["retention"] == "0.02"


class Refusing:
    """An engine that takes no request."""

    tokenizer_manager = SimpleNamespace(model_config=SimpleNamespace(context_len=4096))

    async def async_generate(self, **_: Any) -> dict[str, Any]:
        raise ValueError("the input is longer than the pool")


def test_a_turn_that_an_engine_refuses_is_told_in_a_sentence():
    """Two sessions both fail."""
    sessions = [[Turn([7] * 900, [8])]] * 2
    asker = engines._Asker(Refusing())
    every = engines._each(asker, "full KV", engines._all_said, sessions, 2, (12,))
    expected = "^--transcripts: expected turns that the server takes, of which one has 900 tokens, "
    with pytest.raises(UsageError, match=f"{expected}got 'the input is longer than the pool'"):
        asyncio.run(every)


def test_sessions_of_one_answer_and_unknown_parsers_are_refused(tmp_path):
    file = tmp_path / "sessions.json"
    flags = ["--model-path", str(DEMO_MODEL), "--transcripts", str(file)]
    file.write_text(json.dumps([conversation(0)[:3]]))
    with pytest.raises(UsageError, match=r"^--transcripts: expected a session of at least two"):
        main(flags)
    file.write_text(json.dumps([conversation(0)]))
    with pytest.raises(UsageError, match=r"^--tool-call-parser: expected one of .*hermes"):
        main([*flags, "--tool-call-parser", "unheard"])
    for given in (["--radix-cache-backend", "kvtier"], ["--attention-backend=triton"]):
        with pytest.raises(UsageError, match=r"backend: expected nothing, as a check runs on"):
            main([*flags, *given])
