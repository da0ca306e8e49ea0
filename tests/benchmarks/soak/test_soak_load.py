"""The soak's load: which answers have to be exact, and texts and forks made so that they are."""

from __future__ import annotations

import pytest

pytest.importorskip("aiohttp")

from soak_answers import RULE, said

from benchmarks.soak.load import SHORT, TURNS, Load, exact_forks, why_exact
from kvtier.synthetic.recall import ANSWER_TOKENS, PROMPT_TOKENS


def test_why_an_answer_of_a_compressing_engine_has_to_be_exact() -> None:
    def why(length: int, *, short: bool = False, measured: bool = False, **changes):
        return why_exact(RULE, range(length), said(**changes), short=short, measured=measured)

    assert why(2000, cached=0) == "computed whole"
    assert why(2000, cached=257) == "computed whole"
    assert why(2000, cached=258) is None
    assert why(2000, cached=0, retracted=1) is None
    assert why(2000, cached=1999, measured=True) == "prompt logprobs"
    assert why(385, cached=380, short=True) == "short"
    assert why(200, cached=190, short=True) == "short"
    assert why(386, cached=380, short=True) is None
    assert why(385, cached=380) is None


def test_short_texts_stay_within_what_locality_heads_keep() -> None:
    longest = SHORT[1] + TURNS * (PROMPT_TOKENS + ANSWER_TOKENS + 1)
    assert longest <= RULE.sink_tokens + RULE.recent_tokens + 1
    assert RULE.dropped(0, longest, longest).num_tokens == 0


def test_no_exact_fork_shares_what_the_turn_or_a_fork_before_it_kept_compressed() -> None:
    text = next(text for text in Load(3, "").texts if len(text.context) > 1300)
    forks = exact_forks(text, RULE)
    assert len(forks) >= 3
    before = [len(text.context) + len(text.questions[0])]
    for prompt in forks:
        shared = next(
            (i for i, (a, b) in enumerate(zip(prompt, text.context, strict=False)) if a != b),
            len(text.context),
        )
        assert shared > RULE.sink_tokens + RULE.recent_tokens
        for prompt_stop in before:
            span = RULE.dropped(0, prompt_stop, prompt_stop)
            assert span.num_tokens
            assert not RULE.can_split(span, shared)
        before.append(shared)
