"""The sessions of the status page: a row each, which opens to show its turns."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from kvtier.sizes import format_bytes
from kvtier.webpage import table

Json = Mapping[str, Any]

CSS = """
.bar { display: flex; height: .6rem; border-radius: .3rem; background: var(--rule);
  overflow: hidden; min-width: 6rem; }
.bar i { display: block; height: 100%; } .kept { background: var(--s1); }
.tier { background: var(--s2); }
.key { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; color: var(--soft); font-size: .85rem;
  margin: .25rem 0 .75rem; }
.key i { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem;
  margin-right: .4rem; vertical-align: -1px; } .key i.none { background: var(--rule); }
.sessions { min-width: 1120px; font-size: .9rem; font-variant-numeric: tabular-nums; }
.sessions .row { display: grid; gap: .9rem; align-items: center; padding: .45rem .6rem;
  grid-template-columns: 7.5rem 5rem 6rem minmax(13.5rem, 1.5fr) 6rem minmax(8rem, 1fr) 12.5rem
  minmax(9rem, 1fr); }
.sessions .row > * { text-align: right; } .sessions .row > .text { text-align: left; }
.sessions .head { font-weight: 600; border-bottom: 1px solid var(--rule); }
.sessions details { border-bottom: 1px solid var(--rule); }
.sessions summary { cursor: pointer; list-style: none; }
.sessions summary::-webkit-details-marker { display: none; }
.sessions summary:hover, .sessions details[open] { background: var(--tile); }
.sessions summary b::before { content: "\\25b8"; display: inline-block; width: 1rem;
  color: var(--soft); }
.sessions details[open] summary b::before { content: "\\25be"; }
.sessions small { display: block; color: var(--soft); font-size: .8rem; }
.sessions .bar { margin: .35rem 0 .15rem; }
.sessions details .wide { padding: 0 .6rem .6rem 1.6rem; }
"""

_SESSION_HEAD = (
    ("Session", "text"), ("Last used", ""), ("Context", ""), ("KV kept on the device", "text"),
    ("Slots", ""), ("Why", "text"), ("In the tier", "text"), ("Last prompt", "text"),
)  # fmt: skip
_TURN_HEAD = (
    *("tokens", "state", "dropped", "slots", "entries of an anchored head"),
    *("why", "NLL, nats", "predicted quality", "in the tier", "restored"),
)


def session_table(sessions: Json, most: int) -> str:
    """Return the table of at most so many of a replica's sessions, see sessions.py."""
    rows = sessions["rows"][:most]
    if not rows:
        return "<h2>Sessions</h2><p>None is cached.</p>"
    seen = f"{sessions['seen']:,}{'' if sessions['complete'] else ' or more'}"
    head = "".join(f'<span class="{kind}">{name}</span>' for name, kind in _SESSION_HEAD)
    drawn = "".join(map(_session, rows))
    return (
        f"<h2>Sessions <small>{len(rows)} of {seen}, newest first; a session is a branch of the "
        "radix tree, and a prefix that several share counts for each of them</small></h2>"
        '<div class="key"><span><i class="kept"></i>kept</span>'
        '<span><i class="none"></i>given back</span>'
        '<span><i class="tier"></i>exact KV sent to the tier</span></div>'
        f'<div class="wide"><div class="sessions"><div class="row head">{head}</div>{drawn}</div>'
        "</div>"
    )


def _session(row: Json) -> str:
    tokens = row["context_tokens"]
    cells = [
        f'<span class="text"><b>{row["branch"]}</b><small>{_session_note(row)}</small></span>',
        "<span>now</span>" if row["is_running"] else f"<span>{_ago(row['idle_s'])}</span>",
        f"<span>{tokens:,}<small>{_shared_note(row)}</small></span>",
        f'<span class="text">{_kept_bar(row)}<small>{_kept_note(row)}</small></span>',
        f"<span>{row['slots']:,}<small>{share(row['slots'], tokens)}</small></span>",
        f'<span class="text">{_why(row)}</span>',
        f'<span class="text">{_tier(row)}</span>',
        f'<span class="text">{_last_prompt(row["last_prompt"])}</span>',
    ]
    turns = table(_TURN_HEAD, [_turn(turn) for turn in row["turns"]])
    return (
        f'<details data-branch="{row["branch"]}"><summary class="row">{"".join(cells)}</summary>'
        f"{turns}</details>"
    )


def _session_note(row: Json) -> str:
    turns = f"{row['num_turns']} turn{'s' if row['num_turns'] != 1 else ''}"
    if row["memory"] is None:
        return turns
    return f"{turns}</small><small>memory {escape(row['memory'][:8])}"


def _shared_note(row: Json) -> str:
    return f"{row['shared_tokens']:,} shared" if row["shared_tokens"] else "tokens"


def _kept_bar(row: Json) -> str:
    return _bar(("kept", row["bytes"] / max(row["full_bytes"], 1)))


def _kept_note(row: Json) -> str:
    kept, full = row["bytes"], row["full_bytes"]
    if kept >= full:
        return f"{format_bytes(kept)}, all of it"
    less = f", {full / kept:.2f}x less" if kept else ""
    return f"{format_bytes(kept)} of {format_bytes(full)}{less}"


def _why(row: Json) -> str:
    """Return the reasons of the newest turns, each once."""
    reasons = dict.fromkeys(_reason(turn) for turn in row["turns"])
    return escape(", ".join(reasons))


def _reason(turn: Json) -> str:
    if turn["is_memory"]:
        return "prefix memory"
    if turn["reason"] is not None:
        return str(turn["reason"])
    if not turn["is_compressed"]:
        return "turn not over"
    return "head profile" if turn["dropped_tokens"] else "nothing dropped"


def _tier(row: Json) -> str:
    tokens = row["tier_tokens"]
    restored = row["restored_tokens"]
    note = f"{tokens:,} tokens" + (f", {restored:,} restored" if restored else "")
    return f"{_bar(('tier', tokens / max(row['context_tokens'], 1)))}<small>{note}</small>"


def _last_prompt(prompt: Json | None) -> str:
    """Return how much of a prompt was computed, and why what was computed before had to be
    again."""
    if prompt is None:
        return ""
    again = sorted(prompt["recomputed"].items(), key=lambda one: -one[1])
    notes = [f"{tokens:,} {escape(reason)}" for reason, tokens in again]
    if "changed_at" in prompt:
        notes.append(f"changed at {prompt['changed_at']:,}")
    computed = f"{prompt['computed']:,} of {prompt['tokens']:,} computed"
    return f"{computed}<small>{', '.join(notes)}</small>"


def _turn(turn: Json) -> list[str]:
    state = "exact" if turn["is_exact"] else "compressed" if turn["is_compressed"] else "computed"
    return [
        f"{turn['begin']:,} to {turn['stop']:,}",
        state,
        f"{turn['dropped_tokens']:,}",
        f"{turn['slots']:,}",
        f"{turn['entries']:,}",
        _reason(turn),
        "" if turn["nll"] is None else f"{turn['nll']:.3f}",
        "" if turn["quality"] is None else f"{turn['quality']:.3f}",
        f"{turn['tier_tokens']:,}",
        f"{turn['restored_tokens']:,}",
    ]


def _bar(*parts: tuple[str, float]) -> str:
    drawn = "".join(
        f'<i class="{name}" style="width:{100 * min(max(share, 0), 1):.2f}%"></i>'
        for name, share in parts
    )
    return f'<span class="bar">{drawn}</span>'


def share(part: float, whole: float) -> str:
    """Return a part of a whole, in percent."""
    return f"{100 * part / whole:.1f}%" if whole else "0%"


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
