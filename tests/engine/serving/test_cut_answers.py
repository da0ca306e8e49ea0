"""Requests that leave another one's compressed turn in its middle, or whose text was edited, in the
real engine: they compute a window of it, what stands behind an edit is copied with its keys turned,
and they say what a transformers model says over the same entries.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from compressing import RULE, RULE_ENV, competing, competing_session
from engine_process import run_engine
from sessions import Prompt, one_by_one, said, tokens
from tierd.live_tier import live_tier
from tiered_engine import ENGINE

from benchmarks.common.engines import ranks_on_a_cpu
from kvtier.heads.reference.compaction import AdaptiveSession
from kvtier.retention.locality import CUT_WINDOW, MOST_AGAIN, WIDE_CUT_WINDOW

pytestmark = pytest.mark.engine

NEW, SHARE = 9, 0.3


@pytest.mark.parametrize(("share", "ranks"), [(0.3, 2), (0.1, 1)])
def test_a_branch_says_what_transformers_says_over_the_same_entries(tmp_path, share, ranks):
    """The first session is left at 900 by two others and at 600 by one, and goes on."""
    window = WIDE_CUT_WINDOW if share < 0.2 else CUT_WINDOW
    rng = random.Random(8)
    first, *tails, more = (tokens(rng, n) for n in (1600, 300, 200, 90, 40))
    # A window that was computed again stays whole, so that what the next one finds is known.
    session = competing_session(share, replace(RULE, recent_tokens=window), ranks=ranks)
    expected = [session.turn(first, NEW).token_ids]
    one, two, three = (session.cut(at - window) for at in (900, 900, 600))
    expected.append(one.turn(first[900 - window : 900] + tails[0], NEW).token_ids)
    two.turn(first[900 - window : 900], 0)
    expected.append(two.turn(tails[1], NEW).token_ids)
    expected.append(three.turn(first[600 - window : 600] + tails[2], NEW).token_ids)
    expected.append(session.turn(more, NEW).token_ids)
    asked = [first, first[:900] + tails[0], first[:900] + tails[1], first[:600] + tails[2]]
    rounds = one_by_one([[prompt] for prompt in asked], NEW)
    rounds.append([{"continues": [0, 0], "input_ids": more, "max_new_tokens": NEW}])
    env = {**RULE_ENV, **competing(tmp_path), **ranks_on_a_cpu(ranks)}
    env |= {"KVTIER_RETENTION": str(share), "KVTIER_LOCALITY_RECENT_TOKENS": str(window)}
    out = run_engine(tmp_path, {**ENGINE, "tp_size": ranks}, rounds, env)
    assert [request["cached_tokens"] for (request,) in out["rounds"]] == [
        0, 900 - window, 900, 600 - window, 1600 + NEW - 1
    ]  # fmt: skip
    assert out["state"]["cut_spans"] == 2
    assert said(out) == [[answer] for answer in expected]


def test_below_a_fifth_a_tier_brings_the_window_back(tmp_path):
    """Whole spans of it; the rest, and what is new, is computed."""
    rng = random.Random(8)
    first, tail = (tokens(rng, n) for n in (1600, 300))
    rounds = one_by_one([[first], [first[:900] + tail]], NEW)
    env = {**RULE_ENV, **competing(tmp_path)}
    env |= {"KVTIER_RETENTION": "0.1", "KVTIER_TIER_SPAN_TOKENS": "64"}
    with live_tier(tmp_path, "--memory", "512m") as tier:
        out = run_engine(tmp_path, ENGINE, rounds, env | {"KVTIER_TIER": tier.address})
    assert out["state"]["integrity"] == []
    found = out["rounds"][1][0]["cached_tokens_details"]
    assert found["device"] == 900 - WIDE_CUT_WINDOW
    assert found["storage"] == 900 // 64 * 64 - found["device"]


class Edited:
    """The context that came of a first request's: pieces of it, by where they stood, and new
    tokens."""

    def __init__(self, session: AdaptiveSession, ids: Prompt, window: int) -> None:
        self.session, self.ids, self.window = session, ids, window

    def answer(self, first: int, pieces: list[Prompt | range], tail: Prompt) -> Prompt:
        """Answer a context that up to `first` is as it was; then come new tokens and ranges of the
        old ones. Behind new ones as many are computed again, 64 at most."""
        begin = max(first - self.window, 0)
        one = self.session.cut(begin)
        computed, again = self.ids[begin:first], 0
        for piece in [*pieces, tail]:
            if isinstance(piece, range):
                start = piece.start + again
                computed = computed + self.ids[piece.start : start]
                if computed:
                    one.compute(computed)
                is_last = piece.stop == len(self.ids)
                stop = piece.stop if is_last else piece.stop - self.window
                one.take(self.session, start, stop)
                computed, again = self.ids[stop : piece.stop], 0
            else:
                computed = computed + piece
                again = min(len(piece), MOST_AGAIN)
        return one.turn(computed, NEW).token_ids

    def prompt(self, first: int, pieces: list[Prompt | range], tail: Prompt) -> Prompt:
        found = self.ids[:first]
        for piece in [*pieces, tail]:
            found += self.ids[piece.start : piece.stop] if isinstance(piece, range) else piece
        return found


@pytest.mark.parametrize(
    ("share", "dtype", "ranks"),
    [(SHARE, None, 2), (SHARE, "int4", 1), (None, None, 1)],
    ids=["30%-tp2", "int4", "all"],
)
def test_edited_contexts_say_what_transformers_says_over_turned_entries(
    tmp_path, share, dtype, ranks
):
    """One text changed; three; an exchange taken out; and two such requests at once."""
    rng = random.Random(8)
    ids, *new = (tokens(rng, count) for count in (2400, 50, 7, 90, 40, 35, 30))
    bits = None if dtype is None else int(dtype.removeprefix("int"))
    session = competing_session(share or 1.0, ranks=ranks, bits=bits)
    expected = [session.turn(ids, NEW).token_ids]
    window = CUT_WINDOW if share else 0
    edited = Edited(session, ids, window)
    three = [new[0], range(600, 1000), new[1], range(1100, 1500), new[2], range(1600, 2400)]
    asked = [
        (500, [new[0], range(700, 2400)], new[3]),
        (400, three, new[4]),
        (900, [range(1500, 2400)], new[5]),
    ]
    prompts = [ids, *(edited.prompt(*one) for one in asked)]
    expected += [edited.answer(*one) for one in asked]
    requests = [{"input_ids": prompt, "max_new_tokens": NEW} for prompt in prompts]
    other = {"input_ids": tokens(rng, 3000), "max_new_tokens": NEW}
    rounds = [requests[:1], requests[1:2], [other, *requests[2:]]]
    env = {**RULE_ENV, **ranks_on_a_cpu(ranks), "KVTIER_REUSE_BEHIND_EDITS": "on"}
    if dtype is not None:
        # A cut codes anew, so it matters who cuts first.
        rounds = [[one] for requests in rounds for one in requests]
        env["KVTIER_KEPT_DTYPE"] = dtype
    if share is not None:
        env |= {**competing(tmp_path), "KVTIER_RETENTION": str(share)}
    engine = {**ENGINE, "max_total_tokens": 24_000, "tp_size": ranks}
    out = run_engine(tmp_path, engine, rounds, env)
    assert out["state"]["integrity"] == []
    found = [request for one in out["rounds"] for request in one]
    del found[2]
    # Behind 50 new tokens as many are computed again, behind 50, 7 and 90 as many, 64 at most.
    moved = [1700 - 50, 1600 - (50 + 7 + 64) - 2 * window, 900]
    assert [one["cached_tokens_details"]["kvtier_moved"] for one in found[1:]] == moved
    assert [request["cached_tokens"] for request in found] == [
        0, 500 - window + moved[0], 400 - window + moved[1], 900 - window + moved[2]
    ]  # fmt: skip
    assert [request["output_ids"] for request in found] == expected


def test_an_evicted_context_is_edited_as_if_it_had_stayed(tmp_path):
    """The tier has it, and another context takes its place in between. Of two ranks."""
    rng = random.Random(9)
    ids, new, tail = (tokens(rng, count) for count in (2400, 50, 40))
    session = competing_session(SHARE, ranks=2)
    expected = [session.turn(ids, NEW).token_ids]
    edited = Edited(session, ids, CUT_WINDOW)
    change = (500, [new, range(700, 2400)], tail)
    prompts = [ids, tokens(rng, 3000), edited.prompt(*change)]
    expected.append(edited.answer(*change))
    env = {**RULE_ENV, **ranks_on_a_cpu(2), **competing(tmp_path)}
    env |= {"KVTIER_RETENTION": str(SHARE), "KVTIER_TIER_SPAN_TOKENS": "64"}
    rounds = one_by_one([[prompt] for prompt in prompts], NEW)
    engine = {**ENGINE, "max_total_tokens": 3_400, "tp_size": 2}
    with live_tier(tmp_path, "--memory", "512m") as tier:
        out = run_engine(tmp_path, engine, rounds, env | {"KVTIER_TIER": tier.address})
    (first,), _, (last,) = said(out)
    assert [first, last] == expected
    assert out["state"]["edited_contexts_restored"] == 1
    (edit,) = out["rounds"][-1]
    moved = 1700 - len(new)
    assert edit["cached_tokens_details"]["kvtier_moved"] == moved
    assert edit["cached_tokens"] == 500 - CUT_WINDOW + moved
