"""The negative log-likelihood of a known right answer, under the policy that serves.

Asking for log-probabilities of a prompt would have the prompt computed exactly, whatever the
policy keeps of it. So the right answer is never in the prompt that is asked about: the engine
generates greedily and says, place by place, how likely the right token was. That holds up to the
first place where it says something else; the next request goes on behind the right token there.

    right answer    4  8  2  1  3
    request 1       4  8  7  …         counts for places 1, 2, 3
    request 2       4  8  2 │ 1  3     counts for places 4, 5
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from kvtier.bench.engine import ChatEngine


def answer_nll(
    engine: ChatEngine, prompt_ids: Sequence[int], answer_ids: Sequence[int], unscored: int
) -> tuple[float, int]:
    """Mean over the answer's tokens but the first `unscored`, in nats per token, each given the
    right ones before it; and how many of the prompt's tokens were cached, at least.

    answer_ids: more than `unscored`
    """
    logprobs: list[float] = []
    cached = len(prompt_ids)
    while len(logprobs) < len(answer_ids):
        at = len(logprobs)
        wanted = answer_ids[at:]
        scored = engine.score([*prompt_ids, *answer_ids[:at]], wanted)
        pairs = zip(scored.output_ids, wanted, strict=True)
        agreed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        logprobs += scored.logprobs[: agreed + 1]
        cached = min(cached, scored.cached_tokens)
    counted = logprobs[unscored:]
    return -sum(counted) / len(counted), cached


__all__ = ["answer_nll"]
