"""The selection benchmark: engines take turns, and overhead is paired within a context."""

from __future__ import annotations

import pytest

from benchmarks.accuracy.selection import BASELINE, in_turns, overheads
from benchmarks.common.recall_engine import Asked


def test_overhead_is_the_median_of_paired_ratios() -> None:
    seconds = {BASELINE: [1.0, 2.0, 4.0], "half kept": [1.1, 2.0, 4.2]}
    found = overheads(seconds)
    assert found[BASELINE] == 0
    assert found["half kept"] == pytest.approx(0.05)


def test_engines_take_turns_and_the_first_context_does_not_count() -> None:
    served: list[tuple[str, int]] = []

    def engine(name: str, turn_s: float):
        def ask(context: int) -> Asked:
            served.append((name, context))
            return Asked(
                kind="", context=context, recalls=(), kv_bytes=0, retained=None,
                turn_s=turn_s + context,
            )  # fmt: skip

        return ask

    names = ("a", "b", "c")
    found = in_turns({name: engine(name, at * 10) for at, name in enumerate(names)}, 6, seed=0)
    assert found == {name: [at * 10 + i for i in range(1, 6)] for at, name in enumerate(names)}
    assert [context for _, context in served] == [i for i in range(6) for _ in names]
    firsts = {name for name, _ in served[::3]}
    assert len(firsts) > 1, "one engine was always first"
