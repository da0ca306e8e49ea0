"""Requests whose text was edited, in the real engine: what stood behind the edit is copied with its
keys turned, and they say what a transformers model says over the same entries.
"""

from __future__ import annotations

import random

import pytest
import torch
from compressing import POLICIES, RULE, RULE_ENV, competing
from engine_process import DEMO_MODEL, run_engine
from tierd.live_tier import live_tier

from benchmarks.common.engines import ranks_on_a_cpu
from kvtier.heads.reference.compaction import AdaptiveSession
from kvtier.heads.tokens import fit_tokens
from kvtier.retention.locality import CUT_WINDOW, MOST_AGAIN
from kvtier.retention.scorers.reconstruction import Reconstruction
from kvtier.retention.shares import FixedShare, Turn
from kvtier.retention.token_worth import TokenWorth

pytestmark = pytest.mark.engine

NEW, SHARE = 9, 0.3


class Edited:
    """The context that came of a first request's: pieces of it, by where they stood, and new
    tokens."""

    def __init__(self, session: AdaptiveSession, ids: list[int], window: int) -> None:
        self.session, self.ids, self.window = session, ids, window

    def answer(self, first: int, pieces: list[list[int] | range], tail: list[int]) -> list[int]:
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

    def prompt(self, first: int, pieces: list[list[int] | range], tail: list[int]) -> list[int]:
        found = self.ids[:first]
        for piece in [*pieces, tail]:
            found += self.ids[piece.start : piece.stop] if isinstance(piece, range) else piece
        return found


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(6, 384) for _ in range(count)]


def begun(share: float | None, dtype: str | None, ranks: int) -> tuple[AdaptiveSession, TokenWorth]:
    """A session of which nothing was said yet, and what tokens are worth in it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    worth = fit_tokens(str(DEMO_MODEL), contexts=3, lengths=[512]).worth
    bits = None if dtype is None else int(dtype.removeprefix("int"))
    session = AdaptiveSession(model, RULE, 512, Reconstruction.of(worth), ranks=ranks, bits=bits)
    session.keep_count = lambda prompt, span: (
        FixedShare(share or 1.0).choose(Turn(prompt, span)).kept_tokens
    )
    return session, worth


@pytest.mark.parametrize(
    ("share", "dtype", "ranks"),
    [(0.3, None, 1), (0.3, None, 2), (0.3, "int4", 1), (None, None, 1)],
    ids=["30%", "30%-tp2", "int4", "all"],
)
def test_edited_contexts_say_what_transformers_says_over_turned_entries(
    tmp_path, share, dtype, ranks
):
    """One text changed; three; an exchange taken out; and two such requests at once."""
    rng = random.Random(8)
    ids, *new = (tokens(rng, count) for count in (2400, 50, 7, 90, 40, 35, 30))
    session, worth = begun(share, dtype, ranks)
    expected = [session.turn(ids, NEW).token_ids]
    edited = Edited(session, ids, CUT_WINDOW if share else 0)
    asked = [
        (500, [new[0], range(700, 2400)], new[3]),
        (
            400,
            [new[0], range(600, 1000), new[1], range(1100, 1500), new[2], range(1600, 2400)],
            new[4],
        ),
        (900, [range(1500, 2400)], new[5]),
    ]
    prompts = [ids, *(edited.prompt(*one) for one in asked)]
    expected += [edited.answer(*one) for one in asked]
    requests = [{"input_ids": prompt, "max_new_tokens": NEW} for prompt in prompts]
    other = {"input_ids": tokens(rng, 3000), "max_new_tokens": NEW}
    rounds = [requests[:1], requests[1:2], [other, *requests[2:]]]
    if dtype is not None:
        # A cut codes anew, so it matters who cuts first.
        rounds = [
            *([request] for request in requests[:2]),
            [other],
            *([request] for request in requests[2:]),
        ]
    engine = {
        "model_path": str(DEMO_MODEL),
        "max_total_tokens": 24_000,
        "chunked_prefill_size": 512,
        "tp_size": ranks,
        **POLICIES["kvtier"],
    }
    env = {**RULE_ENV, **ranks_on_a_cpu(ranks), "KVTIER_REUSE_BEHIND_EDITS": "on"}
    if share is not None:
        env |= {**competing(tmp_path, worth), "KVTIER_RETENTION": str(share)}
    if dtype is not None:
        env["KVTIER_KEPT_DTYPE"] = dtype
    out = run_engine(tmp_path, engine, rounds, env)
    assert out["state"]["integrity"] == []
    found = [request for one in out["rounds"] for request in one]
    del found[2]
    told = [request["cached_tokens_details"] for request in found[1:]]
    window = edited.window
    # Behind 50 new tokens as many are computed again, behind 50, 7 and 90 as many, 64 at most.
    moved = [1700 - 50, 1600 - (50 + 7 + 64) - 2 * window, 900]
    assert [one["kvtier_moved"] for one in told] == moved
    assert [request["cached_tokens"] for request in found] == [
        0, 500 - window + moved[0], 400 - window + moved[1], 900 - window + moved[2]
    ]  # fmt: skip
    assert [request["output_ids"] for request in found] == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_evicted_context_is_edited_as_if_it_had_stayed(tmp_path, ranks):
    """The tier has it, and another context takes its place in between."""
    rng = random.Random(9)
    ids, new, tail = (tokens(rng, count) for count in (2400, 50, 40))
    session, worth = begun(SHARE, None, ranks)
    expected = [session.turn(ids, NEW).token_ids]
    edited = Edited(session, ids, CUT_WINDOW)
    change = (500, [new, range(700, 2400)], tail)
    prompts = [ids, tokens(rng, 3000), edited.prompt(*change)]
    expected.append(edited.answer(*change))
    engine = {
        "model_path": str(DEMO_MODEL),
        "max_total_tokens": 3_400,
        "chunked_prefill_size": 512,
        "tp_size": ranks,
        **POLICIES["kvtier"],
    }
    with live_tier(tmp_path, "--memory", "512m") as tier:
        env = {
            **RULE_ENV,
            **ranks_on_a_cpu(ranks),
            **competing(tmp_path, worth),
            "KVTIER_RETENTION": str(SHARE),
            "KVTIER_TIER": tier.address,
            "KVTIER_TIER_SPAN_TOKENS": "64",
            "KVTIER_TIER_PATIENCE_S": "600",
        }
        rounds = [[{"input_ids": prompt, "max_new_tokens": NEW}] for prompt in prompts]
        out = run_engine(tmp_path, engine, rounds, env)
    assert out["state"]["integrity"] == []
    (first,), _, (last,) = out["rounds"]
    assert [first["output_ids"], last["output_ids"]] == expected
    assert out["state"]["edited_contexts_restored"] == 1
    moved = 1700 - len(new)
    assert last["cached_tokens_details"]["kvtier_moved"] == moved
    assert last["cached_tokens"] == 500 - CUT_WINDOW + moved
