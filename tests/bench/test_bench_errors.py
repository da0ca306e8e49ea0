"""Bad input: one typed error that names the flag, before anything heavy is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from bench_models import SHAPE, make_profile, write_model
from waiting import SAFETY_S

from kvtier.bench.__main__ import main
from kvtier.bench.options import parse_options
from kvtier.bench.planning import make_plans
from kvtier.errors import (
    BudgetError,
    ConfigurationError,
    HeadProfileError,
    HeadProfileMismatchError,
    SizeError,
    UnknownPolicyError,
    UnsupportedModelError,
    UsageError,
)

ALL = "stock, full, kvtier, random, window, full-fp8, kvtier-fp8"
CASES = [
    (["--policies", "full,ful"], UnknownPolicyError, "--policies", ALL),
    (["--policies", "full,full"], UnknownPolicyError, "--policies", "each once"),
    (["--len", "long"], SizeError, "--len", "a size such as"),
    (["--len", "16"], SizeError, "--len", "at least 64"),
    (["--len", "8k"], SizeError, "--len", "at most"),
    (["--turns", "0"], UsageError, "--turns", "at least 1"),
    (["--sessions", "0"], UsageError, "--sessions", "at least 1"),
    (["--questions", "0"], UsageError, "--questions", "at least 1"),
    (["--seed", "-1"], UsageError, "--seed", "at least 0"),
    (["--chunk", "x"], SizeError, "--chunk", "a size such as"),
    (["--device", "tpu"], UsageError, "--device", "one of cpu, cuda"),
    (["--dtype", "int4"], UsageError, "--dtype", "one of float32"),
    (["--workload", "prose"], UsageError, "--workload", "one of auto, recall, text"),
    (["--workload", "text"], UsageError, "--model-path", "tokenizer writes numbers"),
    (["--format", "xml"], UsageError, "--format", "one of table, json"),
    (["--turns"], UsageError, "--turns", "expected one argument"),
    (["--nonsense"], UsageError, "arguments", "--nonsense"),
    (["--budget-sessions", "0.5"], BudgetError, "--budget-sessions", "at least 1"),
    (["--budget-sessions", "2", "--kv-budget", "1g"], UsageError, "--kv-budget", "only one"),
    (["--kv-budget", "1m"], BudgetError, "--kv-budget", "policy full"),
    (["--budget-sessions", "1"], BudgetError, "--budget-sessions", "policy kvtier"),
    (["--json", "no/such/folder/out.json"], UsageError, "--json", "existing directory"),
    (["--report", "."], UsageError, "--report", "existing directory"),
    (["--retention", "2"], ConfigurationError, "--retention", "1"),
    (["--refresh", "never"], ConfigurationError, "--refresh", "turn"),
    (["--refresh", "turn", "--retention", "0.5"], ConfigurationError, "--refresh", "a tier"),
    (["--merge", "some"], ConfigurationError, "--merge", "keepkv"),
]


@pytest.mark.parametrize(("flags", "kind", "argument", "says"), CASES)
def test_bad_input_is_a_typed_error_that_names_the_flag(
    flags: list[str], kind: type[UsageError], argument: str, says: str, model_path: Path
):
    with pytest.raises(UsageError) as caught:
        plan_for(model_path, *flags)
    assert type(caught.value) is kind
    assert caught.value.argument == argument
    assert says in str(caught.value)


def plan_for(folder: Path, *flags: str) -> None:
    make_plans(parse_options(["--len", "4k", "--model-path", str(folder), *flags]))


def test_a_model_that_cannot_be_benched_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UnsupportedModelError, match="--model-path"):
        plan_for(write_model(tmp_path / "split", kv_lora_rank=512))
    with pytest.raises(UsageError, match="weights"):
        plan_for(write_model(tmp_path / "empty", weights=False))
    with pytest.raises(UsageError, match="vocabulary"):
        plan_for(write_model(tmp_path / "small", vocab_size=100))
    with pytest.raises(UsageError, match=r"--model-path: .*existing model directory"):
        plan_for(tmp_path / "nowhere")
    (tmp_path / "bare").mkdir()
    with pytest.raises(UsageError, match=r"--model-path: .*readable file, got .*config\.json"):
        plan_for(tmp_path / "bare")
    with pytest.raises(UsageError, match=r"--model-path: .*a model with a tokenizer"):
        plan_for(write_model(tmp_path / "speechless", tokenizer=False))
    monkeypatch.setattr("kvtier.demo_model.PLACE", "models/gone")
    with pytest.raises(UsageError, match=r"--model-path: .*lacks the demo model"):
        make_plans(parse_options([]))


def test_a_head_profile_that_is_not_there_or_another_models_is_refused(
    tmp_path: Path, model_path: Path
):
    other = tmp_path / "other.json"
    shape = SHAPE.model_copy(update={"num_layers": 2})
    for profile, named in (
        (make_profile(shape=shape, ca_heads=((), (0,))), "head_profile"),
        (make_profile(revision="0" * 16), "revision"),
    ):
        profile.save(other)
        with pytest.raises(HeadProfileMismatchError, match=named):
            plan_for(model_path, "--head-profile", str(other))
    with pytest.raises(HeadProfileError, match=r"gone\.json"):
        plan_for(model_path, "--head-profile", str(tmp_path / "gone.json"))
    (model_path / "head_profile.json").unlink()
    with pytest.raises(HeadProfileError, match=r"--head-profile: .*policy random.*calibrate"):
        plan_for(model_path, "--policies", "full,kvtier,random")
    plan_for(model_path, "--policies", "stock,full,window")


def test_the_command_prints_one_line_and_exits_with_2(capsys: pytest.CaptureFixture[str]):
    assert main(["--turns", "0"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("kvtier.bench: error: --turns: expected")
    assert printed.err.count("\n") == 1


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "sglang", "transformers"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
from kvtier.bench.__main__ import main
assert main([*sys.argv[1:], "--len", "9m"]) == 2
sys.exit(main(sys.argv[1:]))
"""


def test_no_torch_and_no_engine_is_imported_to_plan_or_to_refuse(model_path: Path):
    flags = ["--model-path", str(model_path), "--len", "4k", "--dry-run"]
    command = [sys.executable, "-c", BLOCKED, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SAFETY_S)
    assert done.returncode == 0, done.stderr
    assert "blocked" not in done.stderr
