"""The outcome and the plan as terminal tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvtier.bench.planning import Model, PolicyPlan
from kvtier.bench.policies import POLICIES
from kvtier.bench.schema import (
    Document,
    DocumentBase,
    EngineRun,
    Ratios,
    Replay,
    RunResult,
    Workload,
)
from kvtier.sizes import format_bytes, format_size

NOTHING = "-"
_RATIO_LABELS = {
    "kv_device_bytes": "KV bytes on the device, less",
    "kv_peak_bytes": "peak KV bytes, less",
    "median_ttft_ms": "TTFT of later turns, less",
    "first_ttft_ms": "TTFT of the first turn, less",
    "median_tpot_ms": "TPOT of later turns, less",
    "recall": "recall",
    "nll": "NLL of right answers, less",
    "resident_sessions": "resident sessions, more",
}
PLAIN_WIDTH = 110


def make_console() -> Console:
    """Standard output; wide enough for the tables where it is not a terminal."""
    console = Console(highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def print_document(document: Document, console: Console) -> None:
    """One table per policy, then the ratios."""
    print_head(document, describe_workload(document.workload), console)
    for run in document.runs:
        console.print(columns(f"{run.policy}: {describe_policy(run)}", *turn_rows(run)))
        console.print(_summary_line(run))
        for line in tier_lines(run):
            console.print(line)
    pairs = [pair for pair in (document.ratios, *document.comparisons) if pair is not None]
    if pairs:
        console.print(columns("Ratios (bigger is better)", *ratio_rows(pairs)))
    print_failures(document, console)


def print_head(document: DocumentBase, workload: str, console: Console) -> None:
    """Print what was asked of which model, and what a reader has to know of it. workload:
    described."""
    console.print(f"[bold]{workload}[/bold]  {document.model['path']}")
    for note in document.notes:
        console.print(f"[yellow]Note:[/yellow] {note}")


def print_failures(document: DocumentBase, console: Console) -> None:
    """Print which policies failed."""
    for failure in document.failures:
        console.print(f"[red]{failure.policy} failed[/red] (exit code {failure.exit_code})")


def tier_lines(run: EngineRun) -> list[str]:
    """Return a line on what the tier was used for; none without a tier."""
    tier = run.tier
    if tier is None:
        return []
    parts = [f"{format_bytes(tier.stored_bytes)} of exact KV stored"]
    parts.append(f"spilling held up the engine {tier.spill_s * 1e3:.0f} ms in all")
    if tier.restored_tokens:
        parts.append(f"{tier.restored_tokens:,} tokens restored")
    turns = tier.refreshed_turns
    if turns:
        parts.append(
            f"{turns} requests refreshed, each in {tier.refresh_s / turns * 1e3:.1f} ms after "
            f"waiting {tier.refresh_wait_s / turns * 1e3:.1f} ms for the tier"
        )
        parts.append(f"{format_bytes(tier.refresh_moved_bytes)} moved for it")
    if tier.missed:
        parts.append(f"{tier.missed} refreshes missed")
    return ["tier: " + "; ".join(parts)]


def describe_workload(workload: Workload | Replay) -> str:
    """A workload in one line."""
    if isinstance(workload, Replay):
        return (
            f"{Path(workload.trace).name}: {workload.requests} requests in "
            f"{workload.duration_s:.0f} s, {workload.mean_input_tokens:,.0f} + "
            f"{workload.mean_output_tokens:,.0f} tokens on average, blocks of "
            f"{workload.block_tokens}, seed {workload.seed}"
        )
    sessions, turns, questions = (
        f"{count} {noun}{'s' if count > 1 else ''}"
        for count, noun in (
            (workload.sessions, "session"),
            (workload.turns, "turn"),
            (workload.questions, "question"),
        )
    )
    context = format_size(workload.context_tokens)
    return (
        f"{workload.script}: {sessions} of {turns}, {context} context, {questions} per turn, "
        f"seed {workload.seed}"
    )


def describe_policy(run: EngineRun) -> str:
    """Describe in one line what a policy did: a head profile may leave it nothing to drop."""
    policy = POLICIES[run.policy]
    if run.heads_compete:
        return "all KV heads compete for what is kept of the context"
    if policy.needs_profile and run.ca_share == 1:
        return "every head keeps its whole context, so heads save nothing"
    share = "" if run.ca_share == 1 else f", {run.ca_share:.0%} CA heads"
    return policy.description + share


def ratio_rows(pairs: Sequence[Ratios]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: a label, and a cell per pair, better where it is bigger."""
    rows = []
    for field, label in _RATIO_LABELS.items():
        values = [getattr(pair, field) for pair in pairs]
        if any(value is not None for value in values):
            unit = "" if field == "recall" else "x"
            rows.append([
                label, *(NOTHING if value is None else f"{value:.2f}{unit}" for value in values)
            ])  # fmt: skip
    return ["", *(f"{pair.policy} / {pair.baseline}" for pair in pairs)], rows


def columns(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table with these heads; cells stand right but below an empty one."""
    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head, justify="right" if head else "left")
    for cells in rows:
        table.add_row(*cells)
    return table


def turn_rows(run: RunResult) -> tuple[list[str], list[list[str]]]:
    """Return the heads of a run's turns, and a row of cells for each. Of several sessions, how many
    are still resident."""
    sessions = len({request.session for request in run.requests})
    heads = ["turn", "TTFT ms", "p99 TTFT ms", "TPOT ms", "cached tokens", "KV on device"]
    heads += ["KV peak", "recall", "NLL", "still resident"]
    rows = [
        [
            str(turn.turn),
            f"{turn.ttft_ms:,.1f}",
            f"{turn.p99_ttft_ms:,.1f}",
            f"{turn.tpot_ms:,.2f}",
            f"{turn.cached_tokens:,} / {turn.prompt_tokens:,}",
            format_bytes(turn.kv_device_bytes),
            format_bytes(turn.kv_peak_bytes),
            format_quality(turn.recall),
            format_quality(turn.nll),
            NOTHING
            if turn.resident_sessions is None
            else f"{turn.resident_sessions} of {sessions}",
        ]
        for turn in run.turns
    ]
    if sessions > 1:
        return heads, rows
    # One session is its own 99th percentile.
    return [*heads[:2], *heads[3:-1]], [[*row[:2], *row[3:-1]] for row in rows]


def _summary_line(run: RunResult) -> str:
    summary = run.summary
    parts = [
        f"median_ttft_ms {summary.median_ttft_ms:,.1f}",
        f"p99_ttft_ms {summary.p99_ttft_ms:,.1f}",
        f"median_tpot_ms {summary.median_tpot_ms:,.2f}",
    ]
    quality = f"all turns: recall {format_quality(summary.recall)} ({run.recall_means})"
    if summary.nll is not None:
        quality += f", NLL {summary.nll:.3f} nats per token of right answers"
    if summary.resident_sessions is not None:
        parts.append(f"resident at the end {summary.resident_sessions}")
    return f"later turns: {'  '.join(parts)}  ({run.wall_s:.0f} s in all)\n{quality}\n"


def format_quality(value: float | None) -> str:
    """A recall or an NLL, where there is one."""
    return NOTHING if value is None else f"{value:.3f}"


def print_plan(model: Model, plans: Sequence[PolicyPlan], console: Console) -> None:
    """The dry run: what would be started, and the memory it would take."""
    shape, workload = model.shape, plans[0].plan.workload
    console.print(f"[bold]{describe_workload(workload)}[/bold]  {model.path}")
    console.print(
        f"{shape.num_layers} layers x {shape.num_kv_heads} KV heads x head_dim {shape.head_dim}, "
        f"{model.kv_dtype} KV on {model.device}, positions up to {format_size(model.max_positions)}"
    )
    heads = ["", *(entry.policy.name for entry in plans)]
    console.print(columns("KV memory, predicted", heads, _plan_rows(plans)))
    for entry in plans:
        if entry.profile_note:
            console.print(f"head profile of {entry.policy.name}: {entry.profile_note}")


def _plan_rows(plans: Sequence[PolicyPlan]) -> list[list[str]]:
    full = max(entry.prefill_bytes for entry in plans)
    return [
        ["CA heads", *(f"{entry.profile.ca_share:.1%}" for entry in plans)],
        ["bytes of a slot", *(f"{entry.slot_bytes:,}" for entry in plans)],
        ["one resting session", *(format_bytes(entry.session_bytes) for entry in plans)],
        ["… smaller than full", *(f"{full / entry.session_bytes:.2f}x" for entry in plans)],
        ["one session in prefill", *(format_bytes(entry.prefill_bytes) for entry in plans)],
        ["KV budget", *(format_bytes(entry.plan.pools.budget_bytes) for entry in plans)],
        ["slots", *(f"{entry.plan.pools.max_total_tokens:,}" for entry in plans)],
        ["sessions in the budget", *(f"{entry.plan.pools.sessions:.1f}" for entry in plans)],
    ]
