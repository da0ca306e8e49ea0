"""Files of JSON that users bring: what is wrong with one, every command says, and where."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traffic.trace_models import make_trace, write_trace

from kvtier.calibration.documents import load_curve
from kvtier.calibration.store.transfer import read_export
from kvtier.errors import KvtierError, UsageError
from kvtier.heads.model.config import read_config
from kvtier.heads.profile import load_profile
from kvtier.heads.samples.users import read_user_samples
from kvtier.memory.storage import load_card
from kvtier.memory.traces import read_traces
from kvtier.plan.calibration import load_replay
from kvtier.reading import parse_json, read_json, read_json_lines
from kvtier.retention.locality import LocalityRule
from kvtier.traffic.formats import read_trace

MARK = b"\xef\xbb\xbf"
RULE = LocalityRule(4, 4, 4)


# The readers of files, by the file's name.
READERS = {
    "trace.jsonl": read_trace,
    "traces.jsonl": lambda file: read_traces(file, "prefix", None),
    "samples.jsonl": lambda file: read_user_samples(file, list, [], RULE),
    "replay.json": load_replay,
    "profile.json": load_profile,
    "curve.json": load_curve,
    "export.json": read_export,
    "memory.json": lambda file: load_card(file.parent),
    "config.json": lambda file: read_config(str(file.parent)),
}
HOSTILE = {
    "nested": (b'{"a": ' + b"[" * 100_000, "nested"),
    "overflow": (b'{"a": 1e999}', "expected a number that a float holds, got '1e999'"),
    "digits": (b'{"a": ' + b"9" * 5000 + b"}", "expected a number of at most 300 digits"),
    "bytes": (b'{"a": "\xff"}', r"expected UTF-8 text, got b'\xff'"),
    "utf-16": ('{"a": 1}'.encode("utf-16"), "expected UTF-8 text"),
    "cut off": (b'{"a": "b', """expected a JSON object (is cut off), got '{"a": "b'"""),
    "no JSON": (b"{a: 1}", "expected a JSON object (Expecting property name"),
    "no object": (b"[1, 2]", "expected a JSON object, got '[1, 2]'"),
    "infinite": (b'{"a": -Infinity}', "expected a finite number, got '-Infinity'"),
}


# Some models' own files say Infinity; a document names the field that is not finite.
MAY_BE_INFINITE = ("config.json", "curve.json")
CASES = [(n, k) for n in READERS for k in HOSTILE if k != "infinite" or n not in MAY_BE_INFINITE]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_hostile_file_is_refused_by_what_is_wrong_with_it(tmp_path: Path, name: str, kind: str):
    file = tmp_path / name
    raw, says = HOSTILE[kind]
    file.write_bytes(raw)
    with pytest.raises(KvtierError) as caught:
        READERS[name](file)
    assert str(file) in str(caught.value)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 400


def test_the_line_is_named_wherever_it_is(tmp_path: Path):
    file = tmp_path / "x.json"
    for wrong in ("NaN", "1e999", "9" * 301, "maybe", '"\xff"'):
        file.write_bytes(f'{{"NaN 1e999":\n "\\"{wrong[:5]}",\n"b": {wrong}}}'.encode("latin-1"))
        line = 2 if "\xff" in wrong else 3
        with pytest.raises(UsageError, match=rf"x\.json, line {line}: expected"):
            read_json(file, "--file")
    file.write_text('{"a": 1}\n\n{"a": NaN}\n')
    with pytest.raises(UsageError, match=r"x\.json, line 3: expected a finite number"):
        list(read_json_lines(file, "--file"))
    with pytest.raises(UsageError, match=r"--file: expected a readable file, got .*No such file"):
        read_json(tmp_path / "gone", "--file")


def test_a_byte_order_mark_and_ends_of_lines_inside_of_texts_are_no_fault(tmp_path: Path):
    file = write_trace(tmp_path / "trace.jsonl", make_trace(1))
    file.write_bytes(MARK + file.read_bytes().replace(b"\n", b"\r\n"))
    assert read_trace(file) == make_trace(1)
    file.write_bytes(MARK + '{"a": "x\u2028y"}\n'.encode())
    assert read_json(file, "--file") == {"a": "x\u2028y"}
    assert [found for _, found in read_json_lines(file, "--file")] == [{"a": "x\u2028y"}]


@given(
    st.dictionaries(st.text(), st.integers() | st.text() | st.floats(allow_nan=False) | st.none())
)
def test_what_is_json_is_read_as_python_reads_it(document):
    text = json.dumps(document)
    if "Infinity" not in text:
        assert parse_json(text.encode(), "it") == json.loads(text)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(raw):
    with contextlib.suppress(UsageError):
        assert isinstance(parse_json(raw, "it", finite=False), dict)
