"""The GPU's check says what it lacks, and what failed does not hide what was measured."""

import pytest
import torch

from benchmarks.gpu import check as gpu_check


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert "a CUDA device is wanted" in capsys.readouterr().err


def test_bars_are_met_and_missed_by_what_was_measured():
    row = {
        "shape": "batch 1, 2 of 8 CA heads",
        "retained_bytes": 85,
        "retained_s": 1.0,
        "voted_s": 1.1,
        "full_bytes": 340,
        "full_s": 4.0,
    }
    document = {
        "tests": {"ran": True, "passed": True},
        "equal": {"a": 1e-3, "b": 3e-3},
        "read_bytes_per_s": 100.0,
        "decode": [row],
        "planning": {"host_us": 250.0},
        "choosing": {
            "prefill_s": 10.0,
            "selection_s": 0.5,
            "merge_s": 0.6,
            "selection_waits": 0,
            "merge_waits": 1,
        },
        "failures": {},
    }
    met = {bar["bar"]: bar["met"] for bar in gpu_check.bars(document)}
    name = row["shape"]
    assert met == {
        "the equivalence suite passes": True,
        "a: largest difference": True,
        "b: largest difference": False,
        f"{name}: bandwidth / ceiling": True,
        f"{name}: time / full KV's, per byte": True,
        f"{name}: with votes / without": False,
        "host planning of a step, us": False,
        "selection / prefill attention": True,
        "merge / prefill attention": True,
        "selection + merge / prefill attention": False,
        "choosing: times that the host waits": False,
    }


@pytest.mark.parametrize("part", ["peers", "flashinfer"])
def test_a_part_that_wants_a_switch_says_so(part, capsys):
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(["--parts", "equal", part])
    assert ended.value.code == 2
    assert f"--parts {part} wants --{part}" in capsys.readouterr().err


def test_flashinfer_that_was_asked_for_and_failed_is_a_bar_that_is_not_met():
    times = dict.fromkeys(("retained_s", "voted_s", "full_s", "retained_bytes", "full_bytes"), 1)
    row = {"shape": "batch 1", "flashinfer_missing": "ImportError: x", **times}
    met = {bar["bar"]: bar["met"] for bar in gpu_check.bars({"decode": [row], "failures": {}})}
    assert met["batch 1: full KV by FlashInfer: ImportError: x"] is False


def test_a_part_that_fails_is_a_bar_that_is_not_met():
    (bar,) = gpu_check.bars({"failures": {"decode": "OutOfMemoryError: too much"}})
    assert not bar["met"]
    assert "OutOfMemoryError" in bar["bar"]


@pytest.mark.engine
def test_the_engines_part_gives_the_benchs_table(monkeypatch):
    small = ("--turns", "2", "--len", "1k", "--policies", "full,kvtier", "--device", "cpu")
    monkeypatch.setattr(gpu_check, "ENGINE_ARGUMENTS", small)
    # The limit is for a GPU machine's time; how long a busy CPU takes is not what is tested.
    monkeypatch.setattr(gpu_check, "ENGINE_LIMIT_S", 1200)
    found = gpu_check.run_engine()
    assert found["ran"], found
    assert set(found["policies"]) == {"full", "kvtier"}
    assert found["policies"]["kvtier"]["kv_device_bytes"] > 0
    (bar,) = gpu_check.bars({"engine": found, "failures": {}})
    assert bar["met"]


def test_an_engines_bench_that_cannot_start_says_why(monkeypatch):
    monkeypatch.setattr(gpu_check, "ENGINE_ARGUMENTS", ("--len", "nonsense"))
    with pytest.raises(RuntimeError, match="nonsense"):
        gpu_check.run_engine()


def test_tests_that_take_too_long_leave_what_they_said(monkeypatch):
    monkeypatch.setattr(gpu_check, "TESTS_LIMIT_S", 0.5)
    found = gpu_check.run_tests(flashinfer=False)
    assert found["ran"]
    assert not found["passed"]
    assert found["said"][-1] == "stopped after 0.5 s"
