"""Flags of a replay, and what they say of a trace."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from kvtier.bench.schema import Replay
from kvtier.errors import UsageError
from kvtier.sizes import parse_count, parse_number
from kvtier.traffic.continuations import sessions_of
from kvtier.traffic.formats import read_trace
from kvtier.traffic.trace import BLOCK_TOKENS, Trace

SLO_TTFT_MS, SLO_TPOT_MS = "2000", "50"
_FLAGS = ("requests", "block_tokens", "speed", "spread", "slo_ttft", "slo_tpot")


def add_replay_flags(group: argparse._ArgumentGroup) -> None:
    """Flags as text; `parse_replay` gives them meaning."""
    add = group.add_argument
    add("--trace", metavar="FILE", help="JSON lines in Mooncake's format, or agents' sessions "
        "(docs/planning.md)")  # fmt: skip
    add("--requests", metavar="N", help="the first so many alone (all)")
    add("--block-tokens", metavar="N", help=f"what a block of {BLOCK_TOKENS} tokens becomes; all "
        f"lengths in proportion ({BLOCK_TOKENS})")  # fmt: skip
    add("--speed", metavar="X", help="requests arrive so many times as fast (1)")
    add("--spread", metavar="S", help="agents' sessions begin up to so many seconds later (0)")
    add("--slo-ttft", metavar="MS", help=f"goodput: time to the first token ({SLO_TTFT_MS})")
    add("--slo-tpot", metavar="MS", help=f"goodput: time per output token ({SLO_TPOT_MS})")


def parse_replay(args: argparse.Namespace, seed: int) -> Replay | None:
    """The replay that is asked for; None where no trace is named. Raises UsageError, and
    TracesFileError for a malformed trace."""
    if args.trace is None:
        for name in _FLAGS:
            if (text := getattr(args, name)) is not None:
                raise UsageError("--" + name.replace("_", "-"), "a --trace to go with it", text)
        return None
    path = Path(args.trace)
    spread_s = parse_number(args.spread or "0", "--spread", zero=True)
    recorded = read_trace(path, spread_s=spread_s, seed=seed)
    count = parse_count(args.requests or str(len(recorded.requests)), "--requests")
    if count > len(recorded.requests):
        raise UsageError("--requests", f"at most the trace's {len(recorded.requests)}", count)
    block_tokens = parse_count(args.block_tokens or str(BLOCK_TOKENS), "--block-tokens")
    speed = parse_number(args.speed or "1", "--speed")
    trace = recorded.first(count).scaled(block_tokens, speed)
    return Replay(
        trace=str(path.resolve()),
        requests=count,
        block_tokens=block_tokens,
        speed=speed,
        spread_s=spread_s,
        seed=seed,
        slo_ttft_ms=parse_number(args.slo_ttft or SLO_TTFT_MS, "--slo-ttft"),
        slo_tpot_ms=parse_number(args.slo_tpot or SLO_TPOT_MS, "--slo-tpot"),
        **_lengths(trace),
    )


def _lengths(trace: Trace) -> dict[str, float]:
    inputs = [request.input_tokens for request in trace.requests]
    outputs = [request.output_tokens for request in trace.requests]
    return {
        "duration_s": trace.duration_s,
        "mean_input_tokens": float(np.mean(inputs)),
        "mean_output_tokens": float(np.mean(outputs)),
        "longest_tokens": max(a + b for a, b in zip(inputs, outputs, strict=True)),
        "conversations": max(sessions_of(trace)) + 1,
    }


def open_trace(replay: Replay) -> Trace:
    """The trace of a replay, scaled."""
    recorded = read_trace(Path(replay.trace), spread_s=replay.spread_s, seed=replay.seed)
    return recorded.first(replay.requests).scaled(replay.block_tokens, replay.speed)
