"""Pages that need nothing but themselves: inline CSS, light and dark, no script.

Shared by the bench's report and the server's status page. Texts are escaped by who puts them in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_CSS = """
:root { color-scheme: light dark; --ink: #1d2530; --soft: #5b6675; --rule: #d9dee5; --page: #ffffff;
  --tile: #f4f6f9; --s0: #8a5a00; --s1: #0b62c4; --s2: #0a7d4f; --s3: #a3308a; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --soft: #9aa5b4; --rule: #333c48;
  --page: #14181e; --tile: #1d232b; --s0: #e0a33a; --s1: #66aaff; --s2: #45c48c; --s3: #e17cc9;
  --bad: #ff8a80; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p.soft, .tile span { color: var(--soft); }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.25rem 0; }
.tile { background: var(--tile); border-radius: 8px; padding: .6rem 1rem; min-width: 8rem; }
.tile b { display: block; font-size: 1.5rem; } .tile span { font-size: .85rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--rule);
  font-variant-numeric: tabular-nums; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
pre { background: var(--tile); padding: .75rem; border-radius: 8px; overflow-x: auto;
  font-size: .8rem; }
"""


def page(title: str, body: Iterable[str], css: str = "", head: str = "") -> str:
    """A whole document. title: not escaped yet; css, head: what only this page has."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{head}<title>{escape(title)}</title><style>{_CSS}{css}</style></head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


def tile(value: str, text: str) -> str:
    """A headline number."""
    return f'<div class="tile"><b>{value}</b><span>{text}</span></div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of texts that are not escaped yet."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    drawn = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{drawn}</div>'
