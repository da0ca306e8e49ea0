"""The answers of schedulers as one HTML page, which needs nothing else, and no script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from kvtier.sizes import format_bytes
from kvtier.webpage import page, table, tile
from kvtier_sglang.status.figures import FIGURES, Kind
from kvtier_sglang.status.session_table import CSS, session_table, share

Json = Mapping[str, Any]

_CSS = """
body { max-width: 1180px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); }
h2 small { font-weight: normal; color: var(--soft); font-size: .85rem; }
.bad { color: var(--bad); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(30rem, 1fr));
  gap: 0 2rem; }
.figures td:first-child { font-family: ui-monospace, monospace; font-size: .8rem;
  white-space: normal; overflow-wrap: anywhere; }
"""


class Server(NamedTuple):
    """The facts of the page about the server as a whole. asked_at: local time, as text; shadow: the
    figures of shadow.Counts, None where no turns are shadowed."""

    model_name: str
    asked_at: str
    shadow: Json | None = None


def render(server: Server, replicas: Sequence[Json | None], most: int) -> str:
    """Return the whole page. replicas: the answer of each; None where its cache is not kvtier's.
    most: the most sessions to show of each."""
    body = [
        "<h1>kvtier</h1>",
        f'<p class="soft">{escape(server.model_name)}, {escape(server.asked_at)}</p>',
        _shadow(server.shadow),
    ]
    for index, replica in enumerate(replicas):
        if len(replicas) > 1:
            body.append(f"<h2>Replica {index}</h2>")
        body += [_nothing()] if replica is None else _replica(replica, most)
    return page(f"kvtier: {server.model_name}", body, _CSS + CSS)


def _shadow(shadow: Json | None) -> str:
    if shadow is None:
        return ""
    turns, tokens = shadow["turns"], shadow["tokens"]
    told = f"{turns:,} turns were computed again over exact KV"
    if tokens:
        agree = share(shadow["same"], tokens)
        told += f": it agrees with {agree} of the {tokens:,} tokens of their answers"
    if shadow["given_up"]:
        told += f"; {shadow['given_up']:,} were given up"
    return f"<p>{told}.</p>"


def _nothing() -> str:
    return "<p>The radix cache of this server is not kvtier's: there is nothing to show.</p>"


def _replica(status: Json, most: int) -> list[str]:
    return [
        _tiles(status),
        f"<h2>What is kept, and by which rule</h2><p>{_policy(status['policy'])}</p>",
        session_table(status["sessions"], most),
        _memories(status["memories"]),
        _figures(status),
    ]


# -- headline --


def _tiles(status: Json) -> str:
    figures = status["figures"]
    used, capacity = (_value(figures, f"kvtier_pool_{n}_bytes") for n in ("used", "capacity"))
    rows = status["sessions"]["rows"]
    running = sum(row["is_running"] for row in rows)
    tiles = [
        tile(share(used, capacity), f"of the KV pool in use, {format_bytes(used)}"),
        tile(
            f"{_value(figures, 'kvtier_idle_branches'):,.0f}",
            f"idle sessions, {running} running",
        ),
        *_kept_tile(status["retention"], rows),
        *_tier_tiles(figures),
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _kept_tile(retention: Json, rows: Sequence[Json]) -> list[str]:
    """Return the tiles of what all sessions of the answer keep, and of what the share rule has
    chosen since the start."""
    full = sum(row["full_bytes"] for row in rows)
    if not full:
        return []
    kept = sum(row["bytes"] for row in rows)
    tiles = [tile(f"{full / max(kept, 1):.2f}x", "less KV than full contexts, sessions below")]
    if retention["prompt_tokens"]:
        of_prompts = share(retention["kept_tokens"], retention["prompt_tokens"])
        tiles.append(tile(of_prompts, "of prompt tokens kept by CA heads, so far"))
    return tiles


def _tier_tiles(figures: Json) -> list[str]:
    if not figures["kvtier_engine_tier_healthy"]:
        return [tile("none", "tier: exact KV is not kept elsewhere")]
    healthy = bool(_value(figures, "kvtier_engine_tier_healthy"))
    state = "well" if healthy else '<span class="bad">away</span>'
    tiles = [
        tile(
            state,
            f"tier, {_value(figures, 'kvtier_engine_tier_pending'):,.0f} calls on their way",
        ),
        tile(f"{_value(figures, 'kvtier_restored_tokens'):,.0f}", "tokens restored from the tier"),
    ]
    if figures["kvtier_refreshes"]:
        turns = figures["kvtier_refreshes"].get("refreshed_turns", 0)
        tiles.append(tile(f"{turns:,.0f}", "turns refreshed by their question"))
    return tiles


def _policy(policy: Json) -> str:
    """Return the rule in words."""
    numbers = ", ".join(f"{name} {value:g}" for name, value in policy["share"].items())
    rule = escape(policy["share_rule"] + (f" ({numbers})" if numbers else ""))
    scorer = f", chosen by {escape(policy['scorer'])}" if policy["scorer"] else ""
    window = (
        f"the first {policy['sink_tokens']:,} and the last {policy['recent_tokens']:,} tokens of a "
        f"{'long ' if policy['recent_of'] > 1 else ''}prompt, what was generated"
    )
    if policy["heads_compete"]:
        return (
            f"All {policy['heads']} KV heads compete for the entries that <b>{rule}</b> allows "
            f"each context{scorer}. Every head keeps {window}."
        )
    kept = f"of each context what <b>{rule}</b> allows{scorer}"
    if policy["share_rule"] == "everything":
        kept = "the whole context"
    text = (
        f"<b>{policy['ca_heads']} of {policy['heads']}</b> KV heads are context-anchored (head "
        f"profile: {escape(policy['head_method'])}) and keep {kept}."
    )
    if policy["ca_heads"] < policy["heads"]:
        one = ", and one entry for what they dropped" if policy["compensation"] else ""
        text += f" The others are locality heads and keep {window}{one}."
    return text


def _memories(memories: Json | None) -> str:
    if memories is None:
        return ""
    rows = [[one["digest"], f"{one['prefix_tokens']:,}"] for one in memories["loaded"]]
    counted = ", ".join(
        f"{name.replace('_', ' ')} {value:,}"
        for name, value in memories.items()
        if name not in ("loaded", "bytes")
    )
    note = f"{format_bytes(memories['bytes'])} on the device{', ' + counted if counted else ''}"
    return f"<h2>Prefix memories <small>{escape(note)}</small></h2>" + table(
        ["digest", "tokens of the prefix"], rows
    )


# -- figures --


def _figures(status: Json) -> str:
    """Return tables of all figures, by the names that their metrics have, and of the turns, by the
    reasons for what they keep."""
    reasons = status["retention"]["reasons"]
    turns = [[f'kvtier_turns_total{{reason="{name}"}}', f"{n:,}"] for name, n in reasons.items()]
    if turns:
        for name in ("prompt", "retained"):
            key = "prompt_tokens" if name == "prompt" else "kept_tokens"
            turns.append([f"kvtier_{name}_tokens_total", f"{status['retention'][key]:,}"])
    groups = {"Turns": turns, "Prompts": [], "Pool": [], "Tier": [], "Refreshes": []}
    for figure in FIGURES:
        rows = [
            [_metric(figure.name, figure.kind, figure.label, label), _number(value)]
            for label, value in sorted(status["figures"][figure.name].items())
        ]
        groups[_group(figure.name)] += rows
    drawn = "".join(
        f"<section><h2>{name}</h2>{table(['metric', 'value'], rows)}</section>"
        for name, rows in groups.items()
        if rows
    )
    ranks = f" Bytes are those of one of {status['ranks']} ranks." if status["ranks"] > 1 else ""
    return (
        f'<div class="figures">{drawn}</div><p class="soft">Names are those of the metrics on '
        f"<code>/metrics</code> (--enable-metrics).{ranks} Asking took "
        f"{1000 * status['took_s']:.1f} ms of the scheduler's time.</p>"
    )


def _group(name: str) -> str:
    part = name.removeprefix("kvtier_")
    if part.startswith("refresh"):
        return "Refreshes"
    if part.startswith(("hit", "new", "recomputed")):
        return "Prompts"
    if part.startswith(("engine_tier", "restored")):
        return "Tier"
    return "Pool" if part.startswith(("pool", "idle")) else "Turns"


def _metric(name: str, kind: Kind, key: str, label: str) -> str:
    """Return a sample's name as Prometheus writes it, but without the label of the model."""
    suffix = "_total" if kind is Kind.COUNTER else ""
    return f"{name}{suffix}" + (f'{{{key}="{label}"}}' if key else "")


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.3f}"


def _value(figures: Json, name: str) -> float:
    found: float = figures[name][""]
    return found
