"""`kvtier plan`: what it refuses, and what it writes for a small trace and described sessions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from traffic.trace_models import make_trace, write_trace

from kvtier.cli import main
from kvtier.plan.study import PlanDocument, PolicyPlan
from kvtier.traffic.formats import read_trace
from kvtier.traffic.probe import probe_trace

PROFILE = ["--ca-share", "0.25", "--retention", "1"]
FAST = ["--gpu", "a100", "--model", "llama-3-8b", "--tp", "1", "-q"]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(write_trace(tmp_path / "small.jsonl", make_trace(3, conversations=40, gap_s=0.02)))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--trace", "gone"], "--trace: expected a readable file"),
        (["--policies", "full,none"], "--policies: expected some of full, kvtier, kvtier-tier"),
        (["--gpu", "b42"], "--gpu: expected one of h100"),
        (["--model", "gpt"], "--model: expected one of llama-3-8b"),
        (["--tp", "1"], "--tp: expected enough accelerators for the weights"),
        (["--ca-share", "2"], "--ca-share: expected a number above 0, up to 1"),
        (["--slo-ttft", "0"], "--slo-ttft: expected a number above 0"),
        (["--turns", "0.5"], "--turns: expected a number of at least 1"),
        (["--calibration", "gone"], "--calibration: expected a readable file"),
        (["--calibration", "REPLAY"], "--calibration: expected what"),
        (["--write-probe", "no/such/file"], "--write-probe: expected a file in an existing"),
        (
            ["--write-probe", "f", "--probe-token-time", "0"],
            "--probe-token-time: expected a number",
        ),
        (["--json", "no/such/file"], "--json: expected a file in an existing directory"),
        (["--trace", "FILE", "--turns", "3"], "--turns: expected no such flag beside --trace"),
        (["--trace", "FILE", "--requests", "100000"], "--requests: expected at most"),
    ],
)
def test_bad_input_is_refused_by_its_flag(flags, says, trace, tmp_path, capsys):
    (tmp_path / "other.json").write_text('{"runs": []}')
    files = {"FILE": trace, "REPLAY": str(tmp_path / "other.json")}
    traffic = [] if "--trace" in flags else ["--sessions", "5"]
    assert main(["plan", "-q", *traffic, *(files.get(flag, flag) for flag in flags)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_long_contexts_fit_a_small_replica_because_fewer_are_in_flight(capsys):
    flags = ["--model", "llama-3-8b", "--tp", "1", "--context-tokens", "32768", "--replicas", "2"]
    assert main(["plan", "-q", "--sessions", "8", "--slo-ttft", "60000", *flags]) == 0
    assert "54 GB for KV" in capsys.readouterr().out


def agents(tmp_path: Path, *flags: str) -> tuple[int, list[PolicyPlan]]:
    """Contexts of 109k tokens on average, some of half a million, on one H100 with an 8B model."""
    out = tmp_path / "plan.json"
    traffic = ["--sessions", "60", "--turns", "2", "--context-tokens", "80000"]
    traffic += ["--length-spread", "1", "--max-tokens", "600000"]
    replica = ["--model", "llama-3-8b", "--tp", "1", "--max-replicas", "64"]
    times = ["--slo-ttft", "600000", "--slo-tpot", "1000"]
    code = main(["plan", "-q", *traffic, *replica, *times, "--json", str(out), *flags])
    document = PlanDocument.model_validate_json(out.read_text())
    assert document.traffic["mean_input_tokens"] > 100_000
    return code, list(document.policies)


@pytest.mark.parametrize("flags", [PROFILE, []], ids=["profile", "competing"])
def test_requests_that_no_replica_holds_are_refused_or_compressed_as_they_come(
    tmp_path, capsys, flags
):
    """Full KV refuses what is larger than the pool, and the rest is planned; kvtier refuses none,
    and takes no more GPUs."""
    code, plans = agents(tmp_path, *flags)
    printed = capsys.readouterr().out
    assert code == 1
    full, *ours = (plan.best for plan in plans)
    assert full.meets_times
    assert full.refused > 0
    assert full.least_refused_tokens > full.request_room_tokens
    assert full.verdict == f"NO: {full.refused} refused"
    assert full.verdict in printed
    assert f"{full.refused}, from {full.least_refused_tokens:,} tokens" in printed
    for found in ours:
        assert found.meets_times
        assert found.refused == 0
        assert found.request_room_tokens == full.request_room_tokens
        assert found.gpus <= full.gpus


def test_a_fleet_that_serves_nothing_meets_nothing(capsys):
    flags = ["--sessions", "3", "--context-tokens", "200000", "--turns", "1"]
    tiny = ["--model", "llama-3-8b", "--tp", "1", "--memory-used", "0.21", "--max-replicas", "2"]
    policies = ["--policies", "full,kvtier", "--max-tokens", "300000"]
    assert main(["plan", "-q", *flags, *tiny, *policies]) == 1
    assert capsys.readouterr().out.count("NO: nothing served, 3 refused") == 2


def test_the_probe_is_a_trace_that_a_replay_can_read(tmp_path, capsys):
    file = tmp_path / "probe.jsonl"
    assert main(["plan", "--write-probe", str(file), "--probe-token-time", "0.001"]) == 0
    assert capsys.readouterr().out.startswith(f"{file}: ")
    assert read_trace(file) == probe_trace(0.5, 0.001)


def test_a_trace_gives_a_table_a_document_and_a_page(trace, tmp_path, capsys):
    out, report = tmp_path / "plan.json", tmp_path / "plan.html"
    files = ["--json", str(out), "--report", str(report)]
    money = ["--gpu-hour-cost", "2", "--slo-ttft", "3000"]
    assert main(["plan", "--trace", trace, *FAST, *money, *files]) == 0
    printed = capsys.readouterr().out
    assert "sessions resident at the end" in printed
    document = PlanDocument.model_validate_json(out.read_text())
    assert [plan.policy for plan in document.policies] == ["full", "kvtier", "kvtier-tier"]
    rates = [rate for _, rate in document.lru]
    assert rates == sorted(rates)
    for plan in document.policies:
        assert plan.best is not None
        assert plan.best.meets_slo
        assert plan.best.gpus == plan.best.replicas
        smaller = [one for one in plan.tried if one.replicas < plan.best.replicas]
        assert not any(one.meets_times for one in smaller)
        assert plan.best.verdict == "yes"
        assert plan.best.hit_device + plan.best.hit_tier + plan.best.recomputed == pytest.approx(1)
        assert plan.best.cost_per_million_tokens > 0
    page = report.read_text()
    assert "<svg" in page
    assert "http" not in page
    assert "<script" not in page


def test_described_sessions_are_simulated_at_a_size(capsys):
    flags = ["--sessions", "20", "--turns", "2", "--replicas", "2", "--policies", "full,kvtier"]
    assert main(["plan", *FAST, *flags, "--format", "json"]) in (0, 1)
    document = json.loads(capsys.readouterr().out)
    assert [len(plan["tried"]) for plan in document["policies"]] == [1, 1]
    assert document["traffic"]["sessions"] == 20
