"""`kvtier trace explain`: what a log says, as a table and as JSON, and what is no log."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvtier import cli
from kvtier.errors import TracesFileError, UsageError
from kvtier.traffic.request_log import read_log


def line(
    session: str | None, tokens: int, hit: int, recomputed: dict[str, int], **told: Any
) -> dict[str, Any]:
    fields = {
        "timestamp": 1500, "input_length": tokens, "output_length": 1, "hash_ids": [1],
        "kvtier": {
            "hit": hit, "restored": 0, "computed": tokens - hit, "recomputed": recomputed, **told,
        },
    }  # fmt: skip
    return fields if session is None else {**fields, "session_id": session}


LINES = [
    line("ada", 1000, 0, {}),
    line("bob", 3000, 500, {"evicted": 1200, "cut": 64}),
    line("ada", 2000, 1000, {"edited": 700}, changed_at=30),
    line(None, 100, 0, {}),
]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write(tmp_path, *LINES)


def write(folder: Path, *lines: dict[str, Any]) -> Path:
    file = folder / "log.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return file


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """Nothing is cut off where a terminal is narrow."""
    monkeypatch.setenv("COLUMNS", "40")


def rows(text: str) -> list[list[str]]:
    """The cells of every row that has some."""
    found = (re.split(r" {2,}", line.strip()) for line in text.splitlines())
    return [one for one in found if len(one) > 1]


def test_sessions_and_requests_are_told_the_worst_first(log, capsys):
    assert cli.main(["trace", "explain", str(log)]) == 0
    head, every, *told = rows(capsys.readouterr().out)
    reasons = ["evicted", "edited", "cut"]
    assert head == [
        *("session", "requests", "tokens in", "hit", "restored", "new", "computed again"), *reasons
    ]  # fmt: skip
    assert every == ["all", "4", "6,100", "1,500", "0", "2,636", "1,964", "1,200", "700", "64"]
    assert [one[0] for one in told[:3]] == ["bob", "ada", "(no name)"]
    assert told[3][0] == "line"
    again = "1,200 evicted, 64 cut"
    assert told[4] == ["2", "bob", "1.5 s", "3,000", "500", "0", "2,500", again]
    assert told[5][-2:] == ["700 edited", "30"]
    assert len(told) == 6, "requests that computed nothing again are not among the worst"


def test_one_session_is_told_request_by_request(log, capsys):
    assert cli.main(["trace", "explain", str(log), "--session", "ada"]) == 0
    _, every, session, _, *requests = rows(capsys.readouterr().out)
    assert every[1:] == session[1:] == ["2", "3,000", "1,000", "0", "1,300", "700", "700"]
    assert [one[0] for one in requests] == ["1", "3"]
    # Fewer are shown where that is asked for.
    assert cli.main(["trace", "explain", str(log), "--sessions", "1", "--requests", "0"]) == 0
    text = capsys.readouterr().out
    assert "by session, 1 of 3" in text
    assert [one[0] for one in rows(text)] == ["session", "all", "bob"]


def test_all_of_it_is_there_as_json(log, capsys):
    assert cli.main(["trace", "explain", str(log), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["all"]["recomputed"] == {"evicted": 1200, "cut": 64, "edited": 700}
    assert [one["session"] for one in told["sessions"]] == ["ada", "bob", None]
    assert [one["tokens"] for one in told["requests"]] == [1000, 3000, 2000, 100]
    assert told["all"]["new"] == sum(one["new"] for one in told["sessions"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kvtier": None}, "kvtier"),
        ({"session_id": 5}, "session_id"),
        ({"input_length": -1}, "input_length"),
        ({"kvtier": {**LINES[0]["kvtier"], "hit": "1"}}, "kvtier.hit"),
        ({"kvtier": {**LINES[0]["kvtier"], "recomputed": [1]}}, "kvtier.recomputed"),
        ({"kvtier": {**LINES[0]["kvtier"], "recomputed": {"cut": True}}}, "kvtier.recomputed.cut"),
        ({"kvtier": {**LINES[0]["kvtier"], "changed_at": 1.5}}, "kvtier.changed_at"),
    ],
)
def test_what_is_no_log_is_refused_by_line_and_field(tmp_path, change, named):
    file = write(tmp_path, LINES[1], LINES[0] | change)
    with pytest.raises(TracesFileError, match="line 2") as raised:
        list(read_log(file))
    assert raised.value.argument.endswith(f": {named}")


@pytest.mark.parametrize(
    ("options", "named"),
    [(["--session", "eve"], "--session"), (["--sessions", "x"], "--sessions"),
     (["--requests", "-1"], "--requests")],
)  # fmt: skip
def test_bad_options_are_named(log, capsys, options, named):
    assert cli.main(["trace", "explain", str(log), *options]) == 2
    assert f"kvtier: error: {named}: expected" in capsys.readouterr().err


def test_an_empty_log_and_none_are_refused(tmp_path):
    (tmp_path / "log.jsonl").write_text("")
    for name, kind in (("log.jsonl", UsageError), ("none.jsonl", TracesFileError)):
        with pytest.raises(kind, match="FILE"):
            list(read_log(tmp_path / name))
