"""The parts of one decoding step, from the kernels that torch.profiler saw on the device.

    time ──> ▕qkv▕ rope, store ▕ attention ▕o▕ … ▕lm_head▕ sampling ▕      ▕qkv▕ …
             └────────────────────── a step ─────────────────────────────┘
                                                              ^ steps are cut here, at its end

Kernels are sorted by name. Where several run at a time, what passes is counted for the one that
began first, so that the parts and the idle time add up to the step.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ATTENTION, PRODUCTS, STORING = "attention", "matrix products", "storing KV"
ELEMENTWISE, IDLE = "norm, rotation, SiLU, copies", "device idle"
PARTS = (ATTENTION, PRODUCTS, STORING, ELEMENTWISE, IDLE)
# The first that is found in a name decides: cuBLAS calls the halves of a long sum "splitK", as
# attention calls the parts of a long context "split", and PyTorch's casts store, too.
KINDS = (
    (PRODUCTS, re.compile(r"nvjet|gemm|gemv|cutlass|cublas|splitkreduce|xmma|dot_kernel", re.I)),
    (
        ATTENTION,
        re.compile(
            r"decode_units|extend_blocks|attend_stretch|merge_(parts|two|lists)|"
            r"schedule_units|deal_pages|(count|write)_kept|"
            r"attention|attn|flash|fmha|_fwd_(grouped_)?kernel",
            re.I,
        ),
    ),
    (STORING, re.compile(r"store_entries|store_kv|set_kv|index_put", re.I)),
)
# A kernel beside the product's own that adds up the parts of a product.
SUMS = re.compile("reduce", re.I)
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
MOST_NAMED = 30
NAME_CHARACTERS = 160


class Ran(NamedTuple):
    """A kernel on the device. begin, end: in us."""

    name: str
    begin: float
    end: float


def kind_of(name: str) -> str:
    """The part of a step that a kernel of that name belongs to."""
    return next((kind for kind, found in KINDS if found.search(name)), ELEMENTWISE)


def read_trace(file: Path) -> list[Ran]:
    """Return what ran on the device, in order, of a trace that torch.profiler wrote."""
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as stream:
        events = json.load(stream)["traceEvents"]
    return sorted(
        (
            Ran(one["name"], one["ts"], one["ts"] + one["dur"])
            for one in events
            if one.get("cat") in DEVICE_EVENTS
        ),
        key=lambda ran: ran.begin,
    )


def parts_of(ran: Sequence[Ran], products: int) -> dict[str, Any]:
    """Milliseconds of each of PARTS in a step, the steps that were seen, and the kernels that took
    longest. ran: in order, of whole steps at the end; products: matrix products of a step, the last
    of them that of the logits.

    Of the steps whose products are all there the first is left out, whose beginning is not known.
    Without two of them `steps` is 0, and there is nothing else.
    """
    ends = [one.end for one in ran if kind_of(one.name) == PRODUCTS and not SUMS.search(one.name)]
    steps = len(ends) // products - 1
    if steps < 1:
        return {"steps": 0}
    begin, end = ends[-1 - steps * products], ends[-1]
    parts: defaultdict[str, float] = defaultdict(float)
    named: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    seen, launches = begin, 0
    for one in ran:
        if one.end <= begin or one.begin >= end:
            continue
        parts[kind_of(one.name)] += max(0.0, min(one.end, end) - max(one.begin, seen))
        seen = max(seen, one.end)
        launches += 1
        named[one.name][0] += one.end - one.begin
        named[one.name][1] += 1
    parts[IDLE] = end - begin - sum(parts.values())
    longest = sorted(named.items(), key=lambda one: -one[1][0])[:MOST_NAMED]
    return {
        "steps": steps,
        "step_ms": (end - begin) / steps / 1000,
        "parts_ms": {part: parts[part] / steps / 1000 for part in PARTS},
        "kernels": launches / steps,
        "longest": [
            {"name": name[:NAME_CHARACTERS], "ms": us / steps / 1000, "launches": count / steps}
            for name, (us, count) in longest
        ],
    }


def lines(policies: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A table: parts of a step in ms, a column for each policy whose step was seen."""
    seen = {name: one["step"] for name, one in policies.items() if _is_seen(one)}
    if not seen:
        return ["no step of decoding was seen on a device"]
    rows = [("ms of a step", list(seen))]
    for part in PARTS:
        rows.append((part, [f"{step['parts_ms'][part]:.2f}" for step in seen.values()]))
    rows.append(("a step, profiled", [f"{step['step_ms']:.2f}" for step in seen.values()]))
    rows.append(("time per token", [f"{1000 * policies[name]['tpot_s']:.2f}" for name in seen]))
    rows.append(("kernels", [f"{step['kernels']:.0f}" for step in seen.values()]))
    return [f"{name:30}" + "".join(f"{cell:>12}" for cell in cells) for name, cells in rows]


def totals(policies: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A table: sessions, KV bytes and tokens per second, a row for each engine that served."""
    rows = [("", "sessions", "KV, GB", "ms a token", "tokens a second")]
    for policy, one in policies.items():
        for name, found in ((policy, one), (f"{policy}, equal bytes", one.get("equal_bytes", {}))):
            if "tpot_s" not in found:
                continue
            kv = found.get("kv_used_bytes")
            rows.append((
                name, str(found["sessions"]), "" if kv is None else f"{kv / 1e9:.3f}",
                f"{1000 * found['tpot_s']:.2f}", f"{found['tokens_per_s']:.1f}",
            ))  # fmt: skip
    return [f"{name:30}" + "".join(f"{cell:>17}" for cell in cells) for name, *cells in rows]


def _is_seen(found: Mapping[str, Any]) -> bool:
    return bool(found.get("step", {}).get("steps"))


__all__ = ["PARTS", "Ran", "kind_of", "lines", "parts_of", "read_trace", "totals"]
