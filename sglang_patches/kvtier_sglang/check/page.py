"""A check as one HTML page: the figures, turn by turn, and where answers differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier import webpage
from kvtier.bench.report import page
from kvtier.bench.report.charts import Series, Steps, line_chart
from kvtier_sglang.check.figures import Document, Figures, TurnResult, figures_of

# Turns beyond so many share the last step of a picture.
MOST_STEPS = 24
_HEAD = "turn|sessions|context|worth kept|agreement|same answers|tool calls|alike|names alike"


def render(document: Document) -> str:
    """Return the whole page."""
    found = document.figures
    numbers = sorted({min(one.turn, MOST_STEPS) for one in document.turns if one.turn > 1})
    groups = [[one for one in document.turns if min(one.turn, MOST_STEPS) == n] for n in numbers]
    labels = tuple(f"{n}+" if n == MOST_STEPS else str(n) for n in numbers)
    by_turn = [figures_of(group) for group in groups]
    sessions = len({one.session for one in document.turns})
    body = [
        page.soft(
            f"{document.model}, {document.transcripts}: {sessions} sessions, "
            f"{found.turns} turns behind their first",
            "Full KV and the server answer the same prompts, turn by turn, as recorded.",
        ),
        page.tiles([
            (share(found.worth), "of the context's worth is kept"),
            (share(found.agreement), "of full KV's tokens are said alike"),
            (share(found.answers), "of full KV's answers are the same to their end"),
            (share(found.calls), f"of {found.tool_calls} tool calls are made alike"),
        ]),
        _charts(by_turn, groups, Steps("turn", labels)),
        "<h2>Turn by turn</h2>",
        webpage.table(
            _HEAD.split("|"),
            [_row(*each) for each in zip(labels, groups, by_turn, strict=True)],
        ),
        page.described("Settings", document.settings),
    ]  # fmt: skip
    return page.page("kvtier check", "kvtier check", body)


def share(value: float | None) -> str:
    """Return a share in percent, a dash where there is none."""
    return "-" if value is None else f"{value:.1%}"


def _charts(
    by_turn: Sequence[Figures], groups: Sequence[Sequence[TurnResult]], steps: Steps
) -> str:
    def chart(title: str, *lines: tuple[str, Callable[[Figures], float | None]]) -> tuple[str, str]:
        series = [
            Series(name, tuple(value(one) for one in by_turn), style)
            for style, (name, value) in enumerate(lines, 1)
        ]
        return title, line_chart(title, series, lambda value: f"{value:.0%}", 1.0, steps)

    context = Series("context", tuple(_mean_prompt(group) for group in groups), 0)
    return page.figures([
        chart("Worth of the context that is kept", ("worth, none below 0", _drawn_worth)),
        chart("Tokens of full KV that are said alike", ("agreement", lambda one: one.agreement)),
        chart("Tool calls that are made alike", ("calls", lambda one: one.calls)),
        (
            "Tokens of the prompt",
            line_chart("prompt", [context], lambda value: f"{value:,.0f}", steps=steps),
        ),
    ])  # fmt: skip


def _drawn_worth(found: Figures) -> float | None:
    """Return the worth kept; 0 for less, as where few answers need the context."""
    return None if found.worth is None else max(0.0, found.worth)


def _row(label: str, group: Sequence[TurnResult], found: Figures) -> list[str]:
    return [
        label, str(len({one.session for one in group})), f"{_mean_prompt(group):,.0f}",
        share(found.worth), share(found.agreement), share(found.answers),
        str(found.tool_calls), share(found.calls), share(found.names),
    ]  # fmt: skip


def _mean_prompt(group: Sequence[TurnResult]) -> float:
    return sum(one.prompt_tokens for one in group) / len(group)
