"""The claims on what the check measured, one bar after the other, and its figures as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.common.bars import Bar, at_least, at_most
from benchmarks.gpu.check.choosing_context import MOST_CHOOSING
from benchmarks.gpu.llama import LAYERS

# The bandwidth over retained bytes, as a share of that of a kernel that only reads.
LEAST_BANDWIDTH = 0.85
# Time per retained byte, against full KV's per byte.
MOST_TIME = 1.1
# Time with votes, against without.
MOST_VOTES = 1.05
# Host time of planning a decoding step.
MOST_PLANNING_US = 200.0
# The largest absolute difference of bfloat16 outputs.
MOST_DIFFERENCE = 2e-3

Figures = Mapping[str, Any]


def make_bars(figures: Figures) -> list[Bar]:
    """The bars of every part that ran, and one that is not met for every part that failed."""
    failures = [Bar(f"{name}: {why}", None, False) for name, why in figures["failures"].items()]
    return [bar for claim in CLAIMS for bar in claim(figures)] + failures


def _tests(figures: Figures) -> Iterator[Bar]:
    if "tests" in figures:
        passed = figures["tests"].get("passed", False)
        yield Bar("the equivalence suite passes", float(passed), passed)


def _equal(figures: Figures) -> Iterator[Bar]:
    for name, difference in figures.get("equal", {}).items():
        yield at_most(f"{name}: largest difference", difference, MOST_DIFFERENCE)


def _decode(figures: Figures) -> Iterator[Bar]:
    ceiling = figures.get("read_bytes_per_s")
    for row in figures.get("decode", []):
        name = row["shape"]
        if "flashinfer_missing" in row:
            why = row["flashinfer_missing"]
            yield Bar(f"{name}: full KV by FlashInfer: {why}", None, False)
        if ceiling:
            share = row["retained_bytes"] / row["retained_s"] / ceiling
            yield at_least(f"{name}: bandwidth / ceiling", share, LEAST_BANDWIDTH)
        time_ratio = row["retained_s"] / row["full_s"]
        per_byte = time_ratio / (row["retained_bytes"] / row["full_bytes"])
        yield at_most(f"{name}: time / full KV's, per byte", per_byte, MOST_TIME)
        votes = row["voted_s"] / row["retained_s"]
        yield at_most(f"{name}: with votes / without", votes, MOST_VOTES)


def _planning(figures: Figures) -> Iterator[Bar]:
    if "planning" in figures:
        host_us = figures["planning"]["host_us"]
        yield at_most("host planning of a step, us", host_us, MOST_PLANNING_US)


def _choosing(figures: Figures) -> Iterator[Bar]:
    if "choosing" not in figures:
        return
    choosing = figures["choosing"]
    for parts in (("selection",), ("merge",), ("selection", "merge")):
        share = sum(choosing[f"{part}_s"] for part in parts) / choosing["prefill_s"]
        yield at_most(f"{' + '.join(parts)} / prefill attention", share, MOST_CHOOSING)
    waits = choosing["selection_waits"] + choosing["merge_waits"]
    yield at_most("choosing: times that the host waits", waits, 0)


def _peers(figures: Figures) -> Iterator[Bar]:
    peers = figures.get("peers", {})
    for row in peers.get("compactor_vllm", []):
        name = f"{row['shape']}: compactor-vllm's kernel"
        yield _same(name, row["difference"])
        yield at_most(f"{name}, our time / its", row["ours_s"] / row["theirs_s"], 1)
    for row in peers.get("kvpress", []):
        yield _same(f"{row['shape']}: kvpress's masked attention", row["difference"])
    for name, why in peers.get("missing", {}).items():
        yield Bar(f"{name} did not run: {why}", None, False)


def _same(name: str, difference: float) -> Bar:
    return at_most(f"{name}, largest difference", difference, MOST_DIFFERENCE)


CLAIMS: tuple[Callable[[Figures], Iterator[Bar]], ...] = (
    _tests,
    _equal,
    _decode,
    _planning,
    _choosing,
    _peers,
)


def lines(figures: Figures) -> Iterator[str]:
    """Everything that was measured, a line each."""
    ceiling = figures.get("read_bytes_per_s")
    if ceiling:
        yield f"read bandwidth {ceiling / 1e12:.2f} TB/s"
    tests = figures.get("tests", {"ran": True})
    if not tests["ran"]:
        yield f"tests did not run, without {tests['missing']}"
    if not tests.get("passed", True):
        yield from tests["said"]
    yield from _decodes(figures)
    choosing = figures.get("choosing", {})
    for name, taken in choosing.get("prefills_s", {}).items():
        yield f"prefill attention of 128k, {LAYERS} layers: {taken:.2f} s by {name}"
    for name, taken in choosing.get("parts_s", {}).items():
        yield f"choosing, one layer: {taken * 1e3:8.2f} ms {name}"


def _decodes(figures: Figures) -> Iterator[str]:
    for row in figures.get("decode", []):
        yield (f"{_retained(row)}, full {row['full_s'] * 1e6:8.1f} us ({row['full_kernel']})")
    for peer in ("compactor_vllm", "kvpress"):
        for row in figures.get("peers", {}).get(peer, []):
            ours, theirs = row["ours_s"] * 1e6, row["theirs_s"] * 1e6
            yield (
                f"{row['shape']:42} ours {ours:8.1f} us, {peer} {theirs:8.1f} us, "
                f"{theirs / ours:.2f}x"
            )


def _retained(row: Mapping[str, Any]) -> str:
    return (
        f"{row['shape']:42} retained {row['retained_s'] * 1e6:8.1f} us, votes "
        f"{row['voted_s'] * 1e6:8.1f} us"
    )
