"""A small trace on the real engine, with every kind of policy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from traffic.trace_models import make_trace, write_trace

from kvtier.bench.replay.schema import ReplayDocument
from kvtier.traffic.lru import hit_rates

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 600
# Windows of a server that keeps 1024 recent tokens, at a sixteenth of the lengths.
SCALED = {
    "KVTIER_LOCALITY_RECENT_TOKENS": "64",
    "KVTIER_LOCALITY_BRANCH_RECENT_TOKENS": "16",
    "KVTIER_TIER_SPAN_TOKENS": "32",
}


@pytest.mark.engine
@pytest.mark.slow
def test_a_trace_is_replayed_by_the_engine_and_its_sharing_meets_the_radix_tree(tmp_path: Path):
    trace = make_trace(7, conversations=8, turns=3, gap_s=0.3)
    file, out = write_trace(tmp_path / "small.jsonl", trace), tmp_path / "out.json"
    command = [
        *(sys.executable, "-m", "kvtier.bench", "--trace", str(file), "--block-tokens", "32"),
        *("--policies", "full,kvtier-tier", "--json", str(out), "-q"),
        *("--model-path", str(ROOT / "models" / "kvtier-demo")),
    ]
    done = subprocess.run(
        command, env=os.environ | SCALED, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    document = ReplayDocument.model_validate_json(out.read_text())
    # Nothing is evicted, so all whole blocks that were computed before are hit; in a prompt that
    # goes on with another its partly filled block is, too, and what comes at the same time is not.
    wanted = hit_rates(trace, [float("inf")])[0]
    for run in document.runs:
        assert [one.output_tokens for one in run.requests] == [
            one.output_tokens for one in trace.scaled(32, 1.0).requests
        ]
        assert all(one.latency_ms >= one.ttft_ms > 0 for one in run.requests)
        assert run.summary.evicted_tokens == 0
        assert wanted * 0.9 < run.summary.hit_rate < wanted * 1.2
        assert run.summary.resident == document.workload.conversations
    assert document.runs[1].tier is not None
    assert document.runs[1].tier.stored_bytes > 0
