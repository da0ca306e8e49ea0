"""The check's figures as lines of text: nothing but the standard library may be there to print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.gpu.llama import LAYERS

Figures = Mapping[str, Any]


def lines(figures: Figures) -> Iterator[str]:
    """Everything that was measured, a line each."""
    ceiling = figures.get("read_bytes_per_s")
    if ceiling:
        yield f"read bandwidth {ceiling / 1e12:.2f} TB/s"
    for name in ("tests", "flashinfer"):
        part = figures.get(name, {"ran": True})
        if not part["ran"]:
            yield f"{name} did not run, without {part['missing']}"
    if not figures.get("tests", {}).get("passed", True):
        yield from figures["tests"]["said"]
    yield from _decodes(figures)
    choosing = figures.get("choosing", {})
    for name, taken in choosing.get("prefills_s", {}).items():
        yield f"prefill attention of 128k, {LAYERS} layers: {taken:.2f} s by {name}"
    for name, taken in choosing.get("parts_s", {}).items():
        yield f"choosing, one layer: {taken * 1e3:8.2f} ms {name}"


def _decodes(figures: Figures) -> Iterator[str]:
    for row in figures.get("decode", []):
        yield (f"{_retained(row)}, full {row['full_s'] * 1e6:8.1f} us ({row['full_kernel']})")
    for row in figures.get("flashinfer", {}).get("decode", []):
        yield f"{_retained(row)}, planning {row['planning_us']:8.1f} us (flashinfer)"
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
