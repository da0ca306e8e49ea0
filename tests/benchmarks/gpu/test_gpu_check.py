"""The GPU's check says what it lacks, and what failed does not hide what was measured."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.common.benchmark import ROOT, Options
from benchmarks.gpu.check import __main__ as gpu_check
from benchmarks.gpu.check import processes
from benchmarks.gpu.check.claims import make_bars

# A GPU machine has torch with numpy, Triton, and nothing else that kvtier or its bench want.
WITHOUT_PACKAGES = """
import importlib.metadata, sys
MISSING = {name.partition(".")[0] for name in sys.argv[2:]}
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Missing())
import importlib
sys.exit(importlib.import_module(sys.argv[1]).main([]))
"""
NOT_THERE = ("pydantic", "rich", "xxhash", "redis", "platformdirs", "grpc",
             "google", "sglang", "flashinfer", "transformers", "lmdb")  # fmt: skip


def test_it_starts_where_there_is_torch_and_triton_alone():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGES, "benchmarks.gpu.check.__main__", *NOT_THERE],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "expected a CUDA device" in done.stderr


def test_every_part_has_its_figures_and_lines(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def fail(asked):
        raise RuntimeError("too much")

    parts = {"planning": lambda _: {"host_us": 100.0}, "read_bytes_per_s": lambda _: 2e12,
             "decode": fail}  # fmt: skip
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    options = gpu_check.BENCHMARK.parse([])
    *_, last = gpu_check.run(options)
    assert last.figures["planning"] == {"host_us": 100.0}
    assert last.figures["failures"] == {"decode": "RuntimeError: too much"}
    assert {bar.name: bar.met for bar in last.bars} == {
        "host planning of a step, us": True,
        "decode: RuntimeError: too much": False,
    }
    assert "read bandwidth 2.00 TB/s" in capsys.readouterr().out


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
    met = {bar.name: bar.met for bar in make_bars(document)}
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


def test_what_failed_or_could_not_run_is_a_bar_that_is_not_met():
    times = dict.fromkeys(("retained_s", "voted_s", "full_s", "retained_bytes", "full_bytes"), 1)
    row = {"shape": "batch 1", "flashinfer_missing": "ImportError: x", **times}
    document = {"decode": [row], "failures": {"equal": "OutOfMemoryError: too much"}}
    met = {bar.name: bar.met for bar in make_bars(document)}
    assert met["batch 1: full KV by FlashInfer: ImportError: x"] is False
    assert met["equal: OutOfMemoryError: too much"] is False


def test_a_part_that_wants_a_switch_says_so_and_is_left_out_without_it(capsys):
    assert gpu_check.main(["--parts", "equal", "peers"]) == 2
    assert "--parts: expected --peers beside the part peers" in capsys.readouterr().err
    assert gpu_check.leaves_out(Options(peers=None), "peers")
    assert not gpu_check.leaves_out(Options(peers=Path("x")), "peers")


def test_tests_that_take_too_long_leave_what_they_said(monkeypatch):
    monkeypatch.setattr(processes, "TESTS_LIMIT_S", 0.5)
    found = processes.run_tests()
    assert found["ran"]
    assert not found["passed"]
    assert found["said"][-1] == "stopped after 0.5 s"
