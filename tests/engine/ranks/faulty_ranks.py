"""The faults of the last tensor parallel rank, for runners whose schedulers are forked from them:
`play(fault)` before the engine is made. A server of one rank is its own last rank.

    slow       its tier answers late
    losing     none of its tier's answers comes
    unsteady   of three of its tier's answers one is late and one does not come, by chance
    parting    it keeps two pages less of every context than its partners do: a planted divergence
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from waiting import be_slow

from kvtier.retention.shares import PAGE, Choice

SLOW_S = 0.1
FAULTS = ("slow", "losing", "unsteady", "parting")


def play(fault: str) -> None:
    if fault == "parting":
        _part()
    else:
        assert fault in FAULTS
        _play_on_the_link(fault)


def _is_last() -> bool:
    from kvtier_sglang.ranks import Ranks

    ranks = Ranks.of_this_process()
    return ranks.rank == ranks.size - 1


def _play_on_the_link(fault: str) -> None:
    from kvtier.tier.link.link import TierLink

    submit, rng = TierLink.submit, random.Random(0)

    def faulty(self: TierLink, work: Callable[[Any], Any], **kwargs: Any) -> Any:
        def worse(client: Any) -> Any:
            now = rng.choice(("slow", "losing", None)) if fault == "unsteady" else fault
            if now == "slow":
                be_slow(SLOW_S)
            return None if now == "losing" else work(client)

        return submit(self, worse if _is_last() else work, **kwargs)

    TierLink.submit = faulty


def _part() -> None:
    from kvtier_sglang.compression.retention import Retention

    choose = Retention.choose

    def alone(self: Retention, turn: Any, share: float | None = None) -> Choice:
        choice = choose(self, turn, share)
        less = 2 * PAGE * _is_last()
        return replace(choice, kept_tokens=max(1, choice.kept_tokens - less))

    Retention.choose = alone
