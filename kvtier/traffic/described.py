"""Traffic that is described instead of recorded: sessions of several turns.

    session    [ shared | context ] answer 1 │think│ [ turn 2 ] answer 2 │think│ …

Sessions arrive as a Poisson process. The number of turns is geometric, lengths are log-normal about
their medians, and think times are exponential. A turn comes a think time after the answer before it
was complete. Its prompt is everything said before and something new.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from kvtier.errors import UsageError
from kvtier.traffic.prefixes import Int32, Traffic


@dataclass(frozen=True)
class Description:
    """The description of a workload.

    sessions, sessions_per_s: the number of sessions, and the rate of their arrivals
    turns:          mean number of turns of a session
    shared_tokens:  length of the prefix of all sessions, such as a system prompt
    context_tokens: median of the tokens that the first turn adds to that
    turn_tokens:    median of the tokens that a later turn adds to the conversation
    output_tokens:  median length of an answer
    think_s:        mean time from an answer to the next turn
    spread:         standard deviation of the logarithm of each length
    max_tokens:     greatest length of a session, which ends before it would become longer
    """

    sessions: int = 1000
    sessions_per_s: float = 1.0
    turns: float = 5.0
    shared_tokens: int = 0
    context_tokens: int = 8192
    turn_tokens: int = 256
    output_tokens: int = 256
    think_s: float = 60.0
    spread: float = 0.5
    max_tokens: int = 131072

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 0.0 if field.name in ("shared_tokens", "think_s", "spread") else 1e-9
            if field.name == "turns":
                least = 1.0
            value = getattr(self, field.name)
            if not least <= value < float("inf"):
                name = "--" + field.name.replace("_", "-")
                raise UsageError(name, f"a number of at least {max(least, 0):g}", value)


def make_traffic(described: Description, seed: int) -> Traffic:
    """Draw the traffic of a description; equal seeds give equal traffic."""
    rng = np.random.default_rng(seed)
    count = described.sessions
    begin = np.cumsum(rng.exponential(1 / described.sessions_per_s, count))
    turns = rng.geometric(1 / described.turns, count)
    total = int(turns.sum())
    session = np.repeat(np.arange(count, dtype=np.int32), turns)
    first = np.concatenate([[0], np.cumsum(turns)[:-1]])
    turn = np.arange(total) - first[session]
    is_first = turn == 0
    median = np.where(is_first, described.context_tokens, described.turn_tokens)
    new = _lengths(rng, median, described.spread)
    output = _lengths(rng, np.full(total, described.output_tokens), described.spread)
    # A turn adds the answer before it, and something new.
    answered = np.where(is_first, 0, np.roll(output, 1))
    added = np.cumsum(new + answered)
    before = (added - new - answered)[first]
    inputs = described.shared_tokens + added - before[session]
    fits = inputs + output <= described.max_tokens
    fits |= is_first
    # The later turns of a session that has become too long do not come, either.
    ended = np.maximum.accumulate(np.where(fits, -1, np.arange(total)))
    keep = ended < first[session]
    think_s = described.think_s * rng.exponential(1.0, total)
    return _assembled(
        described, begin, session[keep], is_first[keep], inputs[keep], output[keep], think_s[keep]
    )


def _lengths(
    rng: np.random.Generator, median: npt.NDArray[np.int64], spread: float
) -> npt.NDArray[np.int64]:
    drawn = median * np.exp(spread * rng.standard_normal(len(median)))
    whole: npt.NDArray[np.int64] = np.maximum(1, np.rint(drawn)).astype(np.int64)
    return whole


def _assembled(
    described: Description,
    begin: npt.NDArray[np.float64],
    session: Int32,
    is_first: npt.NDArray[np.bool_],
    inputs: npt.NDArray[np.int64],
    output: npt.NDArray[np.int64],
    think_s: npt.NDArray[np.float64],
) -> Traffic:
    """Assemble the arrays. Node 0 is the prefix that all sessions share, where there is one; node
    `shift + i` is request i's."""
    total = len(session)
    shift = 1 if described.shared_tokens else 0
    own = np.arange(total, dtype=np.int64) + shift
    inputs = np.minimum(inputs, described.max_tokens)
    continues = np.concatenate([~is_first[1:], [False]])
    start = np.where(is_first, described.shared_tokens, np.roll(inputs, 1))
    parent = np.where(is_first, shift - 1, own - 1)
    depth = np.arange(total) - np.maximum.accumulate(np.where(is_first, np.arange(total), 0))
    # The answer begins the next turn's node.
    out_node = np.where(continues, own + 1, own)
    out_known = np.where(continues, inputs + output - 1, inputs)

    def with_shared(values: npt.NDArray[np.int64], shared: int) -> Int32:
        return np.concatenate([[shared] * shift, values]).astype(np.int32)

    return Traffic(
        arrival_s=np.where(is_first, begin[session], np.inf),
        think_s=think_s,
        next_request=np.where(continues, np.arange(total) + 1, -1).astype(np.int32),
        session=session,
        node=own.astype(np.int32),
        input_tokens=inputs.astype(np.int32),
        output_tokens=output.astype(np.int32),
        out_node=out_node.astype(np.int32),
        out_known=out_known.astype(np.int32),
        parent=with_shared(parent, -1),
        start=with_shared(start, 0),
        stop=with_shared(inputs, described.shared_tokens),
        depth=with_shared(depth + shift, 0),
    )
