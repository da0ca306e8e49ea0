"""The parts that all benchmarks share: flags refused by name, bars judged and printed, JSON, exit
codes."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.common.arguments import Arguments, Options
from benchmarks.common.bars import Bar, at_least, at_most
from benchmarks.common.benchmark import RESULTS, ROOT, Benchmark, Measured
from kvtier.errors import StartupError, UsageError

PROGRAMS = (
    *("cost.branches", "cost.edits", "deploy.tier_in_podman", "gpu.check", "gpu.serving"),
    *("memory.prefix_quality", "planning.fleet_study", "planning.hints", "planning.validation"),
    "real.equality",
    *("real.table", "soak", "tier.crash", "tier.router", "tier.transport"),
)
# The flags that the commands of a folder cannot do without.
WANTED = {
    "cost": ["--scorer-file", "x"],
    "memory": ["--model-path", "x"],
    "planning": ["--trace", "x"],
    "real": ["--model-path", "x"],
}
COMMAND = re.compile(r"`(?:OMP_NUM_THREADS=1 )?(?:python -m )?benchmarks\.([a-z_.]+)([^`]*)`")
PAGES = (*(ROOT / "benchmarks").glob("*.md"), ROOT / "benchmarks" / "peers" / "README.md")
DOCUMENTED = sorted(
    {
        (found[1], found[2].strip())
        for page in PAGES
        for found in COMMAND.finditer(page.read_text())
        if found[1] in PROGRAMS
    }
)


def program(name: str) -> Benchmark:
    """A program's benchmark, which is a module or a package with a `__main__`."""
    folder = ROOT / "benchmarks" / name.replace(".", "/")
    module = f"benchmarks.{name}{'.__main__' if folder.is_dir() else ''}"
    found = importlib.import_module(module).BENCHMARK
    assert isinstance(found, Benchmark)
    return found


def benchmark(run, **more) -> Benchmark:
    return Benchmark("example", "An example.\nAnd more.", lambda arguments: None, run, **more)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_is_called_as_it_says_and_has_good_defaults(name) -> None:
    found = program(name)
    assert found.name == name
    assert found.parse(WANTED.get(name.partition(".")[0], [])).seed == found.seed
    assert found.out is None or found.out.parent == RESULTS


@pytest.mark.parametrize(("name", "flags"), DOCUMENTED)
def test_commands_of_the_documentation_are_parsed(name, flags) -> None:
    program(name).parse(shlex.split(flags.replace("…", "somewhere")))


def test_the_documentation_has_every_program() -> None:
    named = {name for name, _ in DOCUMENTED}
    assert set(PROGRAMS) - named == {"gpu.check"}  # `make gpu-check` runs that one


def test_the_example_of_the_readme_is_a_benchmark(tmp_path: Path, capsys) -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    asked = []

    def measure(tokens: int, seed: int) -> float:
        asked.append((tokens, seed))
        return 0.2

    given = {"Arguments": Arguments, "Options": Options, "Measured": Measured, "at_most": at_most,
             "Benchmark": Benchmark, "RESULTS": RESULTS, "measure": measure}  # fmt: skip
    example = {"__doc__": "An example.", **given}
    exec(code[1], example)
    assert example["main"](["--len", "2k", "--out", str(tmp_path / "out.json")]) == 1
    assert asked == [(2048, 0)]
    assert "NOT met" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [
        ["--count", "0"], ["--some", "5"], ["--rate", "0"], ["--rate", "2"],
        ["--shares", "0.5", "0"], ["--len", "ten"], ["--len", "7"], ["--odd", "2"],
    ],
)  # fmt: skip
def test_a_value_out_of_bounds_names_its_flag(wrong) -> None:
    arguments = Arguments("example", "An example.")
    arguments.whole("--count", 3, "of them")
    arguments.whole("--some", 3, "of four", most=4)
    arguments.number("--rate", 1, "of it", most=1)
    arguments.shares("--shares", [0.5], "of it")
    arguments.size("--len", "4k", "tokens", least=8)
    arguments.add("--odd", type=int, default=1)

    def is_odd(options: Options) -> None:
        if options.odd % 2 == 0:
            raise UsageError("--odd", "an odd number", options.odd)

    arguments.check(is_odd)
    options = arguments.parse(["--shares", "0.5", "1"])
    assert (options.count, options.len, options.shares) == (3, 4096, [0.5, 1])
    with pytest.raises(UsageError) as refused:
        arguments.parse(wrong)
    assert refused.value.argument == wrong[0]


def test_bars_say_what_was_wanted_and_whether_it_is_met() -> None:
    assert str(at_most("time", 1.23456, 2)) == "met      time: 1.235 (wanted: at most 2)"
    assert str(at_least("share", 0.5, 0.85)) == "NOT met  share: 0.5 (wanted: at least 0.85)"
    assert str(Bar("faults", {"kill": 3, "stop": 0}, False)) == "NOT met  faults: kill 3, stop 0"
    assert Bar("accounts", "sound", True).document() == {
        "bar": "accounts", "value": "sound", "met": True,
    }  # fmt: skip
    assert at_most("time", 1, 2).document()["wanted"] == "at most 2"


@pytest.mark.parametrize(("value", "code"), [(1, 0), (3, 1)])
def test_figures_and_bars_are_written_and_a_missed_bar_is_the_exit_code(
    value, code, tmp_path: Path, capsys
) -> None:
    out = tmp_path / "new" / "out.json"
    example = benchmark(lambda _: Measured({"figure": value}, [at_most("figure", value, 2)]))
    assert example.main(["--out", str(out), "--seed", "7"]) == code
    document = json.loads(out.read_text())
    assert document["figure"] == value
    assert document["bars"] == [
        {"bar": "figure", "value": value, "met": code == 0, "wanted": "at most 2"}
    ]
    assert document["environment"]["seed"] == 7
    assert {"kvtier", "python"} <= set(document["environment"]["versions"])
    assert {"schema_version", "started_at", "wall_s"} <= set(document)
    assert capsys.readouterr().out.startswith("met" if code == 0 else "NOT met")


def test_what_was_measured_before_a_failure_is_written(tmp_path: Path, capsys) -> None:
    out = tmp_path / "out.json"

    def run(options: Options) -> Iterator[Measured]:
        if options.seed == 2:
            yield Measured({"nothing": "claimed"})
            return
        yield Measured({"first": 1}, [at_most("first", 1, 0)])
        yield Measured({"first": 1, "second": 2}, [at_most("second", 2, 2)])
        if options.seed == 1:
            raise StartupError("the third did not start")

    assert benchmark(run, out=out).main([]) == 0
    assert benchmark(run, out=out).main(["--seed", "1"]) == 1
    assert json.loads(out.read_text())["second"] == 2
    assert "benchmarks.example: the third did not start" in capsys.readouterr().err
    assert benchmark(run, out=out).main(["--seed", "2"]) == 0
    assert "bars" not in json.loads(out.read_text())


def test_bad_input_and_a_device_that_is_not_there_are_no_measurement(monkeypatch, capsys) -> None:
    def run(options: Options) -> Measured:
        raise AssertionError("nothing is to be measured")

    assert benchmark(run).main(["--seed", "-1"]) == 2
    assert "--seed" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmark(run, gpu=True).main([]) == 2
    assert "expected a CUDA device" in capsys.readouterr().err
