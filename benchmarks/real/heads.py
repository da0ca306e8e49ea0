"""Methods that choose heads, compared: the share of a real context's worth that the heads of each
keep, on text and tasks that nothing was chosen on.

    python -m models.smollm2 --out out/smollm2
    python -m benchmarks.real.heads --model-path out/smollm2

Every method chooses once, on the same contexts of one length. Its best heads at every share then
answer the questions of other contexts, of other lengths, tasks and texts. All heads, none, and as
many random ones are measured beside them. Measurements are kept in --state: a run goes on where it
stopped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.common.benchmark import RESULTS, Arguments, Benchmark, Measured, Options
from benchmarks.common.table import new_table, show
from benchmarks.real.choices import Choice, Setup, chosen_heads
from benchmarks.real.records import Records
from benchmarks.real.statistics import Interval, Losses, difference, kept_worth
from kvtier.heads.methods.base import heads_by_layer
from kvtier.heads.probes.context import HeadProbe
from kvtier.heads.probes.quality import Kept, kept_heads
from kvtier.heads.profile import Head, random_profile, window_profile
from kvtier.heads.progress import Progress, rich_progress
from kvtier.heads.samples.synthetic import HELD_OUT, make_samples

DEFAULT_METHODS = "taylor,razor,contextkeeper"
RANDOM = "random"
# After so many measurements the time of all is foretold.
FIRST_TIMED = 8


def declare(arguments: Arguments) -> None:
    arguments.add("--model-path", type=Path, required=True, help="local model directory")
    arguments.add("--methods", default=DEFAULT_METHODS, help="the first is compared (%(default)s)")
    arguments.shares("--shares", (0.5, 0.33, 0.25, 0.15), "shares of the KV heads")
    arguments.size("--choose-len", "1536", "context tokens to choose on")
    arguments.whole("--choose-contexts", 4, "contexts to choose on")
    arguments.sizes("--lens", ("1536", "4k"), "context tokens to measure at")
    arguments.whole("--contexts", 3, "contexts per task and length to measure on", least=2)
    arguments.whole("--draws", 2, "random choices of heads")
    arguments.add("--state", type=Path, default=Path("out/real-heads"), help="(%(default)s)")


@dataclass(frozen=True)
class Setting:
    """The heads to measure. method: its name; RANDOM's draws are settings of one method."""

    method: str
    share: float
    kept: Kept

    @property
    def name(self) -> str:
        """Return the mask as a hexadecimal number, one bit per head."""
        bits = "".join(str(int(head)) for layer in self.kept for head in layer)
        return f"{int(bits, 2):x}"


def run(options: Options) -> Measured:
    """Choose heads, measure them, and compare the methods."""
    setup = Setup.of(options.model_path, options.choose_len, options.choose_contexts, options.seed)
    described = setup.described()
    records = Records(options.state, described)
    with rich_progress() as progress:
        probe = HeadProbe(setup.load())
        choices = chosen_heads(setup, options.methods.split(","), records, probe, progress)
        settings = all_settings(probe, choices, options.shares, options.draws, options.seed)
        for length in options.lens:
            measure(setup, records, probe, settings, length, options, progress)
    figures = compare(setup, records, settings, options)
    for length in options.lens:
        show(worth_table(figures, length))
        for share in options.shares:
            show(task_table(figures, length, share))
    seconds = {choice.method: round(choice.seconds, 1) for choice in choices}
    return Measured({"settings": described, "seconds_to_choose": seconds, "kept": figures})


def all_settings(
    probe: HeadProbe, choices: Sequence[Choice], shares: Sequence[float], draws: int, seed: int
) -> list[Setting]:
    """Return the settings: all heads, none, and every method's and random heads at every share."""
    layers, total = probe.shape.num_layers, probe.shape.num_layers * probe.shape.num_kv_heads

    def kept(heads: Sequence[Head]) -> Kept:
        return kept_heads(heads_by_layer(heads, layers), probe.shape)

    settings = [
        Setting("full", 1.0, probe.full()),
        Setting("none", 0.0, probe.mask(window_profile(probe.shape))),
    ]
    for share in shares:
        count = max(1, round(share * total))
        settings += [Setting(one.method, share, kept(one.order[:count])) for one in choices]
        settings += [
            Setting(RANDOM, share, probe.mask(random_profile(probe.shape, count, seed + draw)))
            for draw in range(draws)
        ]
    return settings


def measure(
    setup: Setup, records: Records, probe: HeadProbe, settings: Sequence[Setting], length: int,
    options: Options, progress: Progress,
) -> None:  # fmt: skip
    """Measure whatever is not yet in `records`, context by context."""
    tasks = setup.tasks.measuring
    count = options.contexts * len(tasks)
    samples = make_samples(setup.tasks.make, tasks, count, [length], options.seed, HELD_OUT)
    names = dict.fromkeys(setting.name for setting in settings)
    missing = [
        [name for name in names if (length, index, name) not in records] for index in range(count)
    ]
    total, done, began = sum(map(len, missing)), 0, time.perf_counter()
    masks = {setting.name: setting.kept for setting in settings}
    for index, sample in enumerate(samples):
        batch = probe.prepare(sample) if missing[index] else None
        for name in missing[index]:
            assert batch is not None
            found = batch.quality(masks[name])._asdict()
            records.add((length, index, name), found)
            done += 1
            progress(f"{length} tokens, {sample.task}", done, total)
            if done == FIRST_TIMED:
                seconds = (time.perf_counter() - began) / done * total
                print(f"{length} tokens: about {seconds / 60:.0f} minutes", file=sys.stderr)


def compare(
    setup: Setup, records: Records, settings: Sequence[Setting], options: Options
) -> list[dict[str, Any]]:
    """Return one row per length, share and method."""
    tasks = setup.tasks.measuring
    rows = []
    for length in options.lens:
        loss_of = losses(records, settings, length, len(tasks), options.contexts)
        full, none = loss_of["full", 1.0], loss_of["none", 0.0]
        methods = options.methods.split(",")
        for share in options.shares:
            best = loss_of[methods[0], share]
            for method in (*methods, RANDOM):
                mine = loss_of[method, share]
                row = {"length": length, "share": share, "method": method}
                row["all"] = kept_worth(mine, full, none)._asdict()
                row["behind_first"] = difference(best, mine, full, none)._asdict()
                row["tasks"] = {
                    task: kept_worth(mine[[i]], full[[i]], none[[i]])._asdict()
                    for i, task in enumerate(tasks)
                }
                rows.append(row)
    return rows


def losses(
    records: Records, settings: Sequence[Setting], length: int, tasks: int, contexts: int
) -> dict[tuple[str, float], Losses]:
    """Return losses by method and share, each the mean over the method's draws."""
    found: dict[tuple[str, float], list[Losses]] = {}
    for one in settings:
        row = [records[length, index, one.name]["loss"] for index in range(contexts * tasks)]
        # The tasks took turns.
        by_task = np.array(row).reshape(contexts, tasks).T
        found.setdefault((one.method, one.share), []).append(by_task)
    return {key: np.mean(drawn, axis=0) for key, drawn in found.items()}


def worth_table(figures: Sequence[dict[str, Any]], length: int) -> Table:
    """Return a table with a line per share and method, over all tasks."""
    title = f"Kept of what {length} tokens of context are worth (95% interval)"
    columns = ("heads", "method", "kept", "behind the first")
    table = new_table(title, columns, left=("heads", "method"))
    rows = [row for row in figures if row["length"] == length]
    for row in rows:
        is_first = row["method"] == rows[0]["method"]
        behind = "" if is_first else str(Interval(**row["behind_first"]))
        table.add_row(f"{row['share']:.0%}", row["method"], str(Interval(**row["all"])), behind)
    return table


def task_table(figures: Sequence[dict[str, Any]], length: int, share: float) -> Table:
    """Return a table with a line per task and a column per method."""
    rows = [row for row in figures if (row["length"], row["share"]) == (length, share)]
    title = f"By task: {share:.0%} of the heads, {length} tokens"
    table = new_table(title, ("task", *(row["method"] for row in rows)))
    for task in rows[0]["tasks"]:
        table.add_row(task, *(f"{row['tasks'][task]['mean']:.2f}" for row in rows))
    return table


BENCHMARK = Benchmark(
    "real.heads",
    __doc__,
    declare,
    run,
    out=RESULTS / "real-heads.json",
    seeded="of the samples, and of methods that draw",
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
