"""Parts of a report's page: charts side by side, their legend, headline numbers, remarks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kvtier import webpage
from kvtier.bench.report.charts import SERIES_CLASSES

CSS = """
figcaption, .tick { color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(340px, 1fr));
  gap: 1.25rem; }
figure { margin: 0; } figcaption { font-size: .9rem; } svg { width: 100%; height: auto; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin-bottom: 1rem; }
.legend i { display: inline-block;
  width: .8rem; height: .8rem; border-radius: 50%; margin-right: .4rem; vertical-align: -1px; }
.grid { stroke: var(--rule); stroke-width: 1; } .tick { font-size: 12px; fill: var(--soft); }
.series polyline { fill: none; stroke-width: 2; }
.s0 polyline { stroke: var(--s0); } .s1 polyline { stroke: var(--s1); }
.s2 polyline { stroke: var(--s2); } .s3 polyline { stroke: var(--s3); }
.s0 circle { fill: var(--s0); } .s1 circle { fill: var(--s1); }
.s2 circle { fill: var(--s2); } .s3 circle { fill: var(--s3); }
i.s0 { background: var(--s0); } i.s1 { background: var(--s1); }
i.s2 { background: var(--s2); } i.s3 { background: var(--s3); }
"""


def page(title: str, head: str, body: Sequence[str]) -> str:
    """The whole page. title: of the window; head: of the page; body: HTML, empty parts left out."""
    return webpage.page(title, [f"<h1>{escape(head)}</h1>", *body], CSS)


def soft(*lines: str) -> str:
    """Remarks below a heading, a line each."""
    return f'<p class="soft">{"<br>".join(map(escape, lines))}</p>'


def notes(found: Sequence[str]) -> str:
    """Return the notes that a reader has to know beforehand."""
    return "".join(f"<p><b>Note:</b> {escape(note)}</p>" for note in found)


def legend(entries: Sequence[tuple[int, str, str]]) -> str:
    """Style, name and description of what the charts show."""
    shown = "".join(
        f'<span><i class="s{style % SERIES_CLASSES}"></i><b>{escape(name)}</b>: '
        f"{escape(text)}</span>"
        for style, name, text in entries
    )
    return f'<div class="legend">{shown}</div>'


def figures(charts: Sequence[tuple[str, str]]) -> str:
    """Titles and charts, side by side; those without one are left out."""
    shown = "".join(
        f"<figure><figcaption>{escape(title)}</figcaption>{chart}</figure>"
        for title, chart in charts
        if chart
    )
    return f'<div class="charts">{shown}</div>'


def tiles(shown: Sequence[tuple[str, str]]) -> str:
    """Headline numbers, each with what it is."""
    found = "".join(webpage.tile(value, text) for value, text in shown)
    return f'<div class="tiles">{found}</div>'


def described(title: str, facts: Mapping[str, Any]) -> str:
    """Facts as indented JSON."""
    return f"<h2>{escape(title)}</h2><pre>{escape(json.dumps(facts, indent=1))}</pre>"
