"""The fork benchmark: where forks leave, what an arm is asked, and what is judged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.common.recall_contexts import LOOK_ALIKES, make_context
from benchmarks.tier import forks as tier_forks
from benchmarks.tier.forks import choose_forks, make_bars, make_rows, make_table
from benchmarks.tier.forks_engine import Fork, ForkAnswer, Job, Served, serve
from kvtier.bench.engine import Answer
from kvtier.bench.schema import Occupancy
from kvtier.config import Settings
from kvtier.retention.rules import locality_rule

CONTEXT = make_context(LOOK_ALIKES, seed=0, index=0, context_tokens=4096, questions=64)


class Listening:
    """An engine that remembers what it was asked, and `flush` in between."""

    device = "fake"

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...] | str] = []

    def generate(
        self, input_ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]
    ) -> Answer:
        self.asked.append(tuple(input_ids))
        return Answer((stop_ids[0],), len(input_ids), 1.0, 1.0, ())

    def occupancy(self) -> Occupancy:
        return Occupancy(kv_used_bytes=1, kv_peak_bytes=1, kv_capacity_bytes=1)

    def flush(self) -> None:
        self.asked.append("flush")

    def close(self) -> None: ...


def test_a_fork_asks_about_a_fact_in_front_of_it_and_leaves_the_context_in_its_middle() -> None:
    forks = choose_forks(CONTEXT, 20, seed=1)
    assert forks == choose_forks(CONTEXT, 20, seed=1)
    assert len({fork.place for fork in forks}) == 20
    for fork in forks:
        assert fork.place < len(CONTEXT.context_ids) - locality_rule(Settings()).recent_tokens
        said = " ".join(map(str, CONTEXT.context_ids[: fork.place]))
        assert " ".join(map(str, fork.answer_ids)) in said


@pytest.mark.parametrize(
    ("held", "forgets", "expected"),
    [
        (True, False, ["context", "fork", "context", "fork"]),
        (True, True, ["flush", "context", "fork", "flush", "context", "fork"]),
        (False, True, ["flush", "fork", "flush", "fork"]),
    ],
)
def test_an_arm_has_what_it_should_have_when_a_fork_comes(held, forgets, expected) -> None:
    ids = CONTEXT.context_ids
    fork = Fork(place=100, prompt_ids=(1, 2), answer_ids=(3,))
    engine = Listening()
    served = serve(engine, Job(context_ids=ids, forks=(fork, fork), held=held, forgets=forgets))
    names = {ids: "context", (*ids[:100], 1, 2): "fork", "flush": "flush"}
    assert [names.get(one) for one in engine.asked[3:]] == expected
    assert len(served.answers) == 2


def arm(*answers: tuple[int, float]) -> Served:
    """Answers of one token each, with their times to first token."""
    said = (ForkAnswer(output_ids=(token,), cached_tokens=9, ttft_ms=ms) for token, ms in answers)
    return Served(answers=tuple(said), kv_bytes=(0, 0))


def test_a_fork_with_other_tokens_or_a_slower_one_is_said() -> None:
    forks = [Fork(place=i, prompt_ids=(1,), answer_ids=(7,)) for i in (5, 6)]
    rows = make_rows(forks, arm((7, 1), (8, 1)), arm((7, 2), (9, 40)), arm((7, 20), (8, 30)))
    assert [row.equal for row in rows] == [True, False]
    bars = make_bars(rows)
    assert [bar.value for bar in bars] == ["1 of 2", "21 ms against 25 ms", "1 of 2"]
    assert [bar.met for bar in bars] == [False, True, False]
    assert make_table(rows).row_count == 2


@pytest.mark.parametrize(
    ("flags", "named"),
    [(["--retention", "0"], "--retention"), (["--forks", "0"], "--forks"),
     (["--len", "1k", "--forks", "900"], "--len")],
)  # fmt: skip
def test_bad_input_is_refused_by_name(flags, named, capsys) -> None:
    assert tier_forks.main(flags) == 2
    assert named in capsys.readouterr().err


@pytest.mark.engine
def test_forks_of_a_small_context_are_exact(tmp_path: Path) -> None:
    """The times do not matter: of so few tokens the tier need not be the faster one."""
    out = tmp_path / "out.json"
    tier_forks.main(["--len", "2k", "--forks", "3", "--out", str(out)])
    document = json.loads(out.read_text())
    assert document["bars"][0]["value"] == "3 of 3"
    (resting,) = document["context_bytes"]["kvtier"]
    assert resting < document["context_bytes"]["full"] / 2
