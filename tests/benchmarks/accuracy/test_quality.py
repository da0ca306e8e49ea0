"""The quality benchmark's arithmetic: rows over contexts, and when a target holds."""

from __future__ import annotations

import pytest

from benchmarks.accuracy.quality import DENSITIES, all_contexts, main, make_bars, make_rows
from benchmarks.common.recall_engine import Asked
from kvtier.bench.schema import RetainedTurn
from kvtier.synthetic.recall import DEFAULT_LANGUAGE


def asked(kind: str, index: int, recalls: tuple[float, ...], kv: int, share: float | None) -> Asked:
    kept = None
    if share is not None:
        kept = RetainedTurn(
            prompt_tokens=100, kept_tokens=round(100 * share), retention=share, reason="quality",
            nll=2.0 + index, quality=0.95,
        )  # fmt: skip
    return Asked(kind=kind, context=index, recalls=recalls, kv_bytes=kv, turn_s=1.0, retained=kept)


def test_rows_are_means_over_the_contexts_of_a_kind() -> None:
    full = [asked("a", 0, (1.0, 1.0), 100, None), asked("a", 1, (1.0, 0.0), 100, None),
            asked("b", 0, (1.0, 1.0), 100, None)]  # fmt: skip
    served = [asked("a", 0, (1.0, 0.5), 25, 0.2), asked("a", 1, (0.5, 0.5), 25, 0.4),
              asked("b", 0, (1.0, 0.9), 50, 0.5)]  # fmt: skip
    a, b = make_rows(0.95, full, served)
    assert (a.kind, a.nll, a.predicted, a.kv_ratio) == ("a", 2.5, 0.95, 4.0)
    assert a.kept_share == pytest.approx(0.3)
    assert (a.recall, a.full_recall) == (0.625, 0.75)
    assert [bar.met for bar in make_bars([a, b])] == [False, True]


def test_every_kind_has_its_contexts_and_dense_ones_have_more_code_words() -> None:
    contexts = all_contexts(seed=1, count=2, tokens=1024, questions=4)
    kinds = [context.kind for context in contexts]
    assert [kinds.count(kind) for kind in dict.fromkeys(kinds)] == [2] * (2 + len(DENSITIES))
    assert all(len(context.questions) == 4 for context in contexts)
    codes = DEFAULT_LANGUAGE.codes
    counts = {
        kind: sum(t in codes for c in contexts if c.kind == kind for t in c.context_ids)
        for kind in DENSITIES
    }
    few, many = (counts[kind] for kind in DENSITIES)
    assert many > 1.5 * few
    assert contexts == all_contexts(seed=1, count=2, tokens=1024, questions=4)


@pytest.mark.parametrize("target", ["0", "1.5"])
def test_a_target_that_is_no_share_is_refused_by_name(target, capsys) -> None:
    assert main(["--targets", target]) == 2
    assert "--targets" in capsys.readouterr().err
