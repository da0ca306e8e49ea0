"""The record of a method on one context, and what is made of many such records.

A question that the model answers wrongly with its whole cache says nothing about compression, and
one such answer more or less would be the largest difference in the table. So recall is over the
questions that the full cache answers right; recall over all of them is kept beside it.

Draws of a method are averaged per context. The contexts are the sample: standard errors are over
contexts.

    records   (kind, method, kept share, context, seed) -> recall per question, bytes
    rows      (kind, method, kept share)                -> mean recall ± standard error, bytes
    margins   (kind, kept share)                        -> one method minus another, paired
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

# (kind, context) -> per question, whether it is scored.
Scored = Mapping[tuple[str, int], tuple[bool, ...]]


class Record(BaseModel):
    """One context under one method.

    kept_share: share of the full cache's bytes the method was told to keep
    recalls:    per question, the share of codes right, each at its place
    kv_bytes:   measured bytes of what it kept
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str
    kind: str
    context: int
    kept_share: float
    seed: int = 0
    recalls: tuple[float, ...] = Field(min_length=1)
    kv_bytes: int

    @property
    def where(self) -> tuple[str, int]:
        """The context, among those of all kinds."""
        return self.kind, self.context


class Row(BaseModel):
    """A cell of the table.

    recall, recalls: over the scored questions; recalls per context, in their order
    recall_of_all:   over every question asked
    """

    model_config = ConfigDict(frozen=True)

    kind: str
    method: str
    kept_share: float
    recall: float
    standard_error: float
    recall_of_all: float
    kv_bytes: int
    seeds: int
    recalls: tuple[float, ...]


class Margin(NamedTuple):
    """Recall of one method minus another's on the same contexts; bytes are left / right."""

    kind: str
    kept_share: float
    recall: float
    standard_error: float
    bytes_ratio: float


def answered_by_full_cache(records: Iterable[Record]) -> dict[tuple[str, int], tuple[bool, ...]]:
    """Return which questions are scored: those answered right by the first uncompressed record
    there is.

    A context without one, or of which nothing is answered right, has all its questions scored.
    """
    scored: dict[tuple[str, int], tuple[bool, ...]] = {}
    for record in records:
        right = tuple(recall == 1.0 for recall in record.recalls)
        if record.kept_share == 1.0 and any(right):
            scored.setdefault(record.where, right)
    return scored


def make_rows(records: Iterable[Record], scored: Scored) -> list[Row]:
    """Rows in the order in which their first records come."""
    groups: dict[tuple[str, str, float], list[Record]] = defaultdict(list)
    for record in records:
        groups[record.kind, record.method, record.kept_share].append(record)
    return [_row(group, scored) for group in groups.values()]


def _row(group: Sequence[Record], scored: Scored) -> Row:
    by_context: dict[int, list[float]] = defaultdict(list)
    for record in group:
        chosen = scored.get(record.where, (True,) * len(record.recalls))
        pairs = zip(record.recalls, chosen, strict=True)
        by_context[record.context].append(statistics.fmean(r for r, counts in pairs if counts))
    recalls = tuple(statistics.fmean(by_context[index]) for index in sorted(by_context))
    return Row(
        kind=group[0].kind,
        method=group[0].method,
        kept_share=group[0].kept_share,
        recall=statistics.fmean(recalls),
        standard_error=standard_error(recalls),
        recall_of_all=statistics.fmean(statistics.fmean(record.recalls) for record in group),
        kv_bytes=round(statistics.fmean(record.kv_bytes for record in group)),
        seeds=len({record.seed for record in group}),
        recalls=recalls,
    )


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of independent values; 0 for a single one, which says
    nothing."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def margins(rows: Iterable[Row], left: str, right: str) -> list[Margin]:
    """`left` minus `right` wherever both were measured."""
    found = {(row.kind, row.method, row.kept_share): row for row in rows}
    pairs = [
        (row, found[kind, right, share])
        for (kind, method, share), row in found.items()
        if method == left and (kind, right, share) in found
    ]
    return [_margin(mine, theirs) for mine, theirs in pairs]


def _margin(mine: Row, theirs: Row) -> Margin:
    differences = [a - b for a, b in zip(mine.recalls, theirs.recalls, strict=True)]
    return Margin(
        kind=mine.kind,
        kept_share=mine.kept_share,
        recall=statistics.fmean(differences),
        standard_error=standard_error(differences),
        bytes_ratio=mine.kv_bytes / theirs.kv_bytes,
    )
