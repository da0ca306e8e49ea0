"""Several methods on the same samples: the command, its table and JSON, and what is shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_head_calibration import DEMO, run_cli

from kvtier.errors import HeadProfileMismatchError, SamplesFileError, SizeError, UsageError
from kvtier.heads.calibrate import calibrate_heads, run_methods
from kvtier.heads.compare import comparison_document, comparison_table, jaccard
from kvtier.heads.entries import make_entries
from kvtier.heads.methods import Target
from kvtier.heads.probes.context import HeadProbe
from kvtier.heads.profile import load_profile
from kvtier.heads.samples.synthetic import make_samples, tasks_for
from kvtier.synthetic.recall import DEFAULT_LANGUAGE

METHODS = "taylor@0.75,contextkeeper,razor@0.25,import@0.25"


@pytest.fixture(scope="module")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gates of the demo model's shape, open for three heads of its second layer."""
    file = tmp_path_factory.mktemp("pattern") / "full_attention_heads.tsv"
    file.write_text("0.1\t0.2\t0.0\t0.3\n0.9\t0.8\t0.95\t0.4\n0.2\t0.1\t0.0\t0.1\n")
    return file


@pytest.fixture(scope="module")
def run(pattern: Path) -> Any:
    entries = make_entries(METHODS, Target(), {"import": {"pattern": pattern}})
    return run_methods(str(DEMO), entries, lengths=(1024, 2048), samples=2)


def test_every_method_is_measured_on_the_same_samples(run: Any) -> None:
    assert [result.label for result in run.results] == METHODS.split(",")
    full = {(found.full, found.answers) for r in run.results for found in r.verifications[1:]}
    assert len(full) == 1
    taylor, _, razor, imported = run.results
    assert taylor.profile.num_ca_heads == 9
    assert razor.profile.num_ca_heads == imported.profile.num_ca_heads == 3
    assert imported.profile.ca_heads == ((), (0, 1, 2), ())
    assert imported.profile.method == "import"
    # Equally many heads share their control.
    controls = [[found.random for found in result.verifications] for result in run.results]
    assert controls[2] == controls[3] != controls[0]
    assert all(result.seconds > 0 for result in run.results)
    assert run.prefill_seconds > 0


def test_a_comparison_finds_what_single_calibrations_find(run: Any, tmp_path: Path) -> None:
    single = calibrate_heads(
        str(DEMO), "taylor", tmp_path / "p.json", target=Target(share=0.75),
        lengths=(1024, 2048), samples=2,
    )  # fmt: skip
    assert single.profile == run.results[0].profile
    assert load_profile(tmp_path / "p.json") == single.profile


def test_contexts_are_prefilled_once_for_all_methods(
    pattern: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = []
    before = HeadProbe.prepare

    def counting(probe: HeadProbe, sample: Any) -> Any:
        prepared.append(sample)
        return before(probe, sample)

    monkeypatch.setattr(HeadProbe, "prepare", counting)
    parameters = {"import": {"pattern": pattern}}
    for methods, count in ((METHODS, 2 + 2), ("razor,import", 1 + 2)):
        prepared.clear()
        entries = make_entries(methods, Target(), parameters)
        run_methods(str(DEMO), entries, lengths=(1024,), samples=2)
        assert len(prepared) == len(set(map(id, prepared))) == count


def test_the_table_and_the_document_say_the_same(run: Any) -> None:
    document = json.loads(json.dumps(comparison_document(run)))
    table = comparison_table(run)
    assert "32 answers at 2k" in table
    for row, result in zip(document["methods"], run.results, strict=True):
        (line,) = [line for line in table.splitlines() if f" {row['method']} " in line]
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        assert cells[2:4] == [f"{row['num_ca_heads']} of 12", f"{row['ca_share']:.0%}"]
        recalls = [
            f"{at[what]['recall']:.1%}"
            for at in row["measured"]
            for what in ("full", "profile", "random")
        ]
        assert cells[4:10] == recalls
        assert cells[10] == f"{row['agreement']:.2f}"
        assert row["agreement"] == jaccard(run.results[0].profile, result.profile)
    assert document["methods"][0]["agreement"] == 1.0
    assert document["seed"] == 0
    assert document["environment"]["versions"]["torch"]


def test_agreement_is_the_share_of_heads_in_both(run: Any) -> None:
    a, b = (
        run.results[0].profile.model_copy(update={"ca_heads": heads})
        for heads in (((0, 1), (), (2,)), ((1,), (3,), (2,)))
    )
    assert jaccard(a, b) == 2 / 4
    empty = a.model_copy(update={"ca_heads": ((), (), ())})
    assert (jaccard(empty, empty), jaccard(a, empty)) == (1.0, 0.0)


def test_the_command_compares(
    pattern: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "first.json"
    arguments = (
        "--model-path", DEMO, "--method", "import,razor@0.5", "--pattern", pattern, "--len", "1k",
        "--samples", 1, "--candidate-share", 0.4, "--out", out,
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"--candidate-share.*contextkeeper"):
        run_cli(*arguments)
    assert run_cli(*arguments[:10], *arguments[12:]) == 0
    shown = capsys.readouterr().out
    assert "razor@0.5" in shown
    assert "agreement" in shown
    assert load_profile(out).method == "import"
    assert run_cli(*arguments[:10], "--format", "json", "--quiet") == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in document["methods"]] == ["import", "razor@0.5"]


def test_own_samples_are_used_and_every_second_one_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = tasks_for(str(DEMO))
    lines = []
    for sample in make_samples(tasks.make, tasks.choosing, 4, [1024], seed=3):
        text = DEFAULT_LANGUAGE.decode
        questions = [
            {"question": text(q.prompt_ids), "answer": text(q.answer_ids)}
            for q in sample.questions[:4]
        ]
        line = {"context": text(sample.context_ids), "questions": questions, "task": "mine"}
        lines.append(json.dumps(line))
    file, out = tmp_path / "own.jsonl", tmp_path / "p.json"
    file.write_text("\n".join(lines))
    common = ("--model-path", DEMO, "--samples-file", file, "--out", out, "--share", 0.25)
    assert run_cli(*common) == 0
    assert "recall at 1k" in capsys.readouterr().out
    profile = load_profile(out)
    assert profile.costs[0].samples == 2 * 4
    assert profile.costs[0].full > 0.9
    assert profile.parameters["tasks"] == ["mine"]
    assert profile.parameters["contexts"] == [2, 2]
    for option, value in (("--len", "4k"), ("--samples", 2)):
        with pytest.raises(UsageError, match=f"{option}.*--samples-file"):
            run_cli(*common, option, value)
    file.write_text(lines[0] + "\n{}\n")
    with pytest.raises(SamplesFileError, match="line 2: context"):
        run_cli(*common)


@pytest.mark.parametrize(
    ("methods", "match"),
    [
        ("razor,duo", "--method.*'duo'"),
        ("razor,razor", "--method.*different"),
        ("razor@2", "--method.*NAME@SHARE"),
        ("razor@x", "--method.*NAME@SHARE"),
        ("razor,taylor", "--share"),
        ("import", "--pattern"),
    ],
)
def test_bad_lists_of_methods_are_named(methods: str, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        run_cli("--model-path", DEMO, "--method", methods, "--out", "p.json")


def test_other_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--out"):
        run_cli("--model-path", DEMO, "--share", 0.5)
    file = tmp_path / "p.tsv"
    file.write_text("0.1\t0.2\n")
    common = ("--model-path", DEMO, "--method", "import,razor", "--pattern", file)
    with pytest.raises(HeadProfileMismatchError, match="--pattern"):
        run_cli(*common)
    with pytest.raises(SizeError, match="--len"):
        run_cli("--model-path", DEMO, "--method", "razor,contextkeeper", "--len", "128")
