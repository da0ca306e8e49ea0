"""Averages, margins and the table of the Compactor comparison."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from rich.console import Console

from benchmarks.accuracy.compactor import PEER_METHOD, outcome
from benchmarks.accuracy.compactor_engine import METHODS
from benchmarks.accuracy.compactor_records import (
    Record,
    answered_by_full_cache,
    make_rows,
    margins,
    standard_error,
)
from benchmarks.accuracy.compactor_table import print_tables

OURS, THEIRS = METHODS["all"], PEER_METHOD


def record(method: str, context: int, *recalls: float, **changes: object) -> Record:
    fields = {
        "method": method,
        "kind": "standing-out",
        "context": context,
        "kept_share": 0.25,
        "recalls": recalls,
        "kv_bytes": 1000,
    }
    return Record.model_validate(fields | changes)


def test_draws_are_averaged_before_contexts_so_that_they_are_no_sample() -> None:
    records = [record(THEIRS, 0, r, seed=s) for s, r in enumerate((0.0, 1.0))]
    records += [record(THEIRS, 1, 1.0, seed=s) for s in range(2)]
    (row,) = make_rows(records, {})
    assert row.recalls == (0.5, 1.0)
    assert row.recall == 0.75
    assert row.standard_error == pytest.approx(0.25)
    assert row.seeds == 2


def test_only_questions_that_the_full_cache_answers_are_scored() -> None:
    full = record("full cache", 0, 1.0, 0.875, 1.0, kept_share=1.0)
    records = [full, record(OURS, 0, 1.0, 1.0, 0.5)]
    scored = answered_by_full_cache(records)
    assert scored == {full.where: (True, False, True)}
    whole, ours = make_rows(records, scored)
    assert (whole.recall, ours.recall) == (1.0, 0.75)
    assert (whole.recall_of_all, ours.recall_of_all) == pytest.approx((2.875 / 3, 2.5 / 3))


def test_the_first_full_cache_decides_and_a_helpless_one_decides_nothing() -> None:
    first, second = (
        record(m, 0, a, b, kept_share=1.0) for m, a, b in ((THEIRS, 1, 0), (OURS, 0, 1))
    )
    helpless = record(THEIRS, 1, 0.5, 0.0, kept_share=1.0)
    assert answered_by_full_cache([first, second, helpless]) == {first.where: (True, False)}


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12), st.floats(-0.5, 0.5))
def test_a_constant_margin_has_no_error_however_much_contexts_differ(
    recalls: list[float], shift: float
) -> None:
    records = [record(THEIRS, i, r) for i, r in enumerate(recalls)]
    records += [record(OURS, i, r + shift, kv_bytes=500) for i, r in enumerate(recalls)]
    (margin,) = margins(make_rows(records, {}), OURS, THEIRS)
    assert margin.recall == pytest.approx(shift, abs=1e-9)
    assert margin.standard_error == pytest.approx(0, abs=1e-9)
    assert margin.bytes_ratio == 0.5


def test_margins_are_taken_only_where_both_were_measured() -> None:
    records = [record(OURS, 0, 1.0, kept_share=share) for share in (1.0, 0.25)]
    found = margins(make_rows([*records, record(THEIRS, 0, 0.9)], {}), OURS, THEIRS)
    assert [(m.kept_share, round(m.recall, 3)) for m in found] == [(0.25, 0.1)]


def test_a_single_value_has_no_standard_error() -> None:
    assert standard_error([0.3]) == 0.0


def test_a_record_of_a_peer_with_unknown_fields_is_refused() -> None:
    with pytest.raises(ValidationError, match="speed"):
        record(THEIRS, 0, 1.0, speed=3)


def test_the_table_shows_every_method_once_and_says_which_bytes_differ() -> None:
    records = [record(OURS, 0, 0.9, kv_bytes=1100), record(THEIRS, 0, 0.8)]
    records += [record(THEIRS, 0, 0.7, kind="look-alikes")]
    out = io.StringIO()
    print_tables(make_rows(records, {}), {}, OURS, THEIRS, Console(file=out, width=100))
    text = out.getvalue()
    first, second = text.split("look-alikes")
    assert first.count("0.900 ± 0.000") == 1
    assert "+0.100" in first
    assert "1.100 times the bytes" in first
    assert OURS not in second


def test_the_outcome_is_json_with_rows_and_margins() -> None:
    records = [record(OURS, 0, 0.9, 1.0), record(THEIRS, 0, 0.8, 1.0)]
    scored = {records[0].where: (False, True)}
    document = json.loads(json.dumps(outcome(make_rows(records, scored), scored)))
    assert document["scored_questions"] == {"standing-out 0": 1}
    assert [row["method"] for row in document["rows"]] == [OURS, THEIRS]
    assert set(document["margins"][0]) == {
        "kind", "kept_share", "recall", "standard_error", "bytes_ratio",
    }  # fmt: skip
