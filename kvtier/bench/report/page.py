"""One HTML page that needs nothing else: inline CSS, inline SVG, no script."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kvtier.bench.report.charts import SERIES_CLASSES

CSS = """
:root { color-scheme: light dark; --ink: #1d2530; --soft: #5b6675; --rule: #d9dee5; --page: #ffffff;
  --tile: #f4f6f9; --s0: #8a5a00; --s1: #0b62c4; --s2: #0a7d4f; --s3: #a3308a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --soft: #9aa5b4; --rule: #333c48;
  --page: #14181e; --tile: #1d232b; --s0: #e0a33a; --s1: #66aaff; --s2: #45c48c; --s3: #e17cc9; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p.soft, figcaption, .tick, .tile span { color: var(--soft); }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.25rem 0; }
.tile { background: var(--tile); border-radius: 8px; padding: .6rem 1rem; min-width: 8rem; }
.tile b { display: block; font-size: 1.5rem; } .tile span { font-size: .85rem; }
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
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--rule);
  font-variant-numeric: tabular-nums; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
pre { background: var(--tile); padding: .75rem; border-radius: 8px; overflow-x: auto;
  font-size: .8rem; }
"""


def page(title: str, head: str, body: Sequence[str]) -> str:
    """The whole page. title: of the window; head: of the page; body: HTML, empty parts left out."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body>\n"
        + "\n".join(part for part in (f"<h1>{escape(head)}</h1>", *body) if part)
        + "\n</body></html>\n"
    )


def soft(*lines: str) -> str:
    """Remarks below a heading, a line each."""
    return f'<p class="soft">{"<br>".join(map(escape, lines))}</p>'


def notes(found: Sequence[str]) -> str:
    """What a reader has to know beforehand."""
    return "".join(f"<p><b>Note:</b> {escape(note)}</p>" for note in found)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells as text; the first column stands left, numbers right."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    whole = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{whole}</div>'


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
    found = "".join(
        f'<div class="tile"><b>{value}</b><span>{text}</span></div>' for value, text in shown
    )
    return f'<div class="tiles">{found}</div>'


def described(title: str, facts: Mapping[str, Any]) -> str:
    """Facts as indented JSON."""
    return f"<h2>{escape(title)}</h2><pre>{escape(json.dumps(facts, indent=1))}</pre>"


__all__ = ["described", "figures", "legend", "notes", "page", "soft", "table", "tiles"]
