"""Quality over bytes: the kept share of a real context's worth at 75% to 10% of its KV bytes, by
kvtier's ways to keep and by NVIDIA kvpress's presses.

    python -m models.smollm2 --out out/smollm2
    python -m benchmarks.real.table --model-path out/smollm2 --kvpress-python VENV/bin/python

A context is prefilled exactly, but for those that came in several turns. Its questions were unknown
when it was compressed, and all are answered from the KV that is held. Heads and weights are chosen
on other texts. Measurements are kept in --state: a run goes on where it stopped. Without
--kvpress-python there are no presses; their environment is benchmarks/peers/requirements.txt.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.benchmark import RESULTS, Arguments, Benchmark, Measured, Options
from benchmarks.common.table import show
from benchmarks.real.choices import Calibrated, Setup, calibrated, chosen_heads
from benchmarks.real.courses import COURSES, OUT_PLACES, OUT_TOKENS, Case
from benchmarks.real.keeping import (
    ADAPTIVE_RULE,
    CODED,
    DUO,
    Context,
    Keeper,
    Kept,
    NoRoomError,
    Setting,
    adaptive_setting,
    settings_at,
)
from benchmarks.real.presses import press, read_masks
from benchmarks.real.records import Records
from benchmarks.real.samples import (
    CHANGED_FACTS,
    TRANSCRIPTS,
    changed_facts,
    elided,
    of_transcripts,
)
from benchmarks.real.tables import (
    Losses,
    cheapest_table,
    draw_worth,
    kept_worth,
    quality_table,
    recall_table,
    worth_table,
)
from kvtier.calibration.kept_shares import ANSWER_FLOOR_NATS
from kvtier.errors import UsageError
from kvtier.heads.methods import DEFAULT_METHOD
from kvtier.heads.model.config import shape_of
from kvtier.heads.model.loading import load_model
from kvtier.heads.probes.context import HeadProbe
from kvtier.heads.probes.held import Asker, entries, selected
from kvtier.heads.profile import Head
from kvtier.heads.progress import Progress, rich_progress
from kvtier.heads.samples.questions import CalibrationSample
from kvtier.heads.samples.synthetic import HELD_OUT, make_samples, tasks_for
from kvtier.synthetic.tokenizer import Tokenizer
from kvtier.traffic.transcripts import ARGUMENT

FULL, NONE = "all tokens", "no context"
# A record with this name says that all that was asked for is measured of a context.
DONE = "done with"
# With a quality target each context keeps the share that the curve says.
QUALITY, BY_QUALITY = 0.95, "adaptive budgets, quality 0.95"
# These first and last tokens stay of "no context": as many as locality heads hold.
EDGES = (64, 64)
# These ways are in tables beside our settings, not in the pictures.
NOT_DRAWN = (DUO, *CODED, *(course.name for course in COURSES))
OURS = tuple(setting.name for setting in settings_at(1.0) if setting.name not in NOT_DRAWN)


def declare(arguments: Arguments) -> None:
    arguments.add("--model-path", type=Path, required=True, help="local model directory")
    arguments.shares("--shares", (0.75, 0.5, 0.35, 0.25, 0.15, 0.1), "shares of the bytes")
    arguments.sizes("--lens", ("2k", "4k", "7500"), "context tokens")
    arguments.add("--tasks", nargs="+", metavar="TASK", help="to measure on (default: all)")
    arguments.add(
        ARGUMENT, type=Path, metavar="FILE",
        help="to measure on instead: agents' sessions in OpenAI's format, JSON or JSON in gzip",
    )  # fmt: skip
    places = len(OUT_PLACES)
    arguments.add(
        "--elided",
        action="store_true",
        help=f"take {OUT_TOKENS} tokens out of transcripts at {places} places each",
    )
    arguments.whole("--contexts", 2, "contexts per task and length; an interval needs 2")
    arguments.size("--choose-len", "1536", "context tokens to choose heads on")
    arguments.whole("--choose-contexts", 4, "contexts to choose heads on")
    arguments.add("--fit-tasks", nargs="+", metavar="TASK", help="to fit on (default: all)")
    arguments.sizes("--fit-lens", ("1536", "4000"), "context tokens to fit worth on")
    arguments.sizes("--curve-lens", ("2k", "4k"), "context tokens to fit the curve on")
    arguments.whole("--fit-contexts", 11, "contexts to fit the curve on, per length", least=2)
    arguments.add("--settings", nargs="+", metavar="NAME", help="of kvtier's, by name (all)")
    arguments.add("--kvpress-python", type=Path, help="Python of an environment with kvpress")
    arguments.add("--presses", nargs="+", metavar="NAME", help="of kvpress's, as KVzipPress (all)")
    arguments.add("--plots", type=Path, metavar="DIR", help="pictures to write, one per length")
    arguments.add("--state", type=Path, default=Path("out/real-table"), help="(%(default)s)")


class Bench(NamedTuple):
    """The model, the heads and the calibration with which every context is measured."""

    model: Any
    setup: Setup
    order: Sequence[Head]
    calibrated: Calibrated
    shares: Sequence[float]
    settings: Sequence[str]


def run(options: Options) -> Iterator[Measured]:
    """Choose heads, fit, and measure. Yields the table so far after every length."""
    setup = Setup(
        options.model_path, tasks_for(str(options.model_path)), options.choose_len,
        options.choose_contexts, options.seed,
    )  # fmt: skip
    if options.plots is not None and not options.plots.is_dir():
        raise UsageError("--plots", "an existing directory", str(options.plots))
    known_tasks = (*setup.tasks.measuring, *CHANGED_FACTS)
    tasks = asked_for("--tasks", known_tasks, options.tasks or setup.tasks.measuring)
    if len({task in CHANGED_FACTS for task in tasks}) > 1:
        raise UsageError("--tasks", "changed facts alone", options.tasks)
    if options.transcripts is not None:
        if options.tasks:
            raise UsageError("--tasks", f"nothing beside {ARGUMENT}", options.tasks)
        tasks = [TRANSCRIPTS]
    elif options.elided:
        raise UsageError("--elided", f"something only with {ARGUMENT}", "no file")
    fit_tasks = asked_for("--fit-tasks", setup.tasks.measuring, options.fit_tasks)
    settings = asked_for("--settings", (*OURS, *NOT_DRAWN), options.settings)
    described = {
        **setup.described(),
        "heads_by": DEFAULT_METHOD,
        "tasks": tasks,
        "fit_tasks": fit_tasks,
        "fit_contexts": options.fit_contexts,
        "fit_lens": options.fit_lens,
        "curve_lens": options.curve_lens,
        **({TRANSCRIPTS: options.transcripts.name} if options.transcripts else {}),
        **({"elided": [*OUT_PLACES, OUT_TOKENS]} if options.elided else {}),
    }
    records = Records(options.state, described)
    figures: list[dict[str, Any]] = []
    with rich_progress() as progress:
        model = load_model(str(options.model_path))
        probe = HeadProbe(model)
        order = chosen_heads(setup, records, probe, progress)
        known = calibrated(
            options.state, str(options.model_path), tasks=fit_tasks, contexts=options.fit_contexts,
            fit_lengths=options.fit_lens, curve_lengths=options.curve_lens,
            rule=ADAPTIVE_RULE, seed=options.seed, progress=progress,
        )  # fmt: skip
        bench = Bench(model, setup, order, known, options.shares, settings)
        for length in options.lens:
            measure(bench, records, tasks, length, options, progress)
            figures += compare(records, tasks, length, options)
            if options.plots is not None:
                draw_worth(
                    figures, length, (*OURS, BY_QUALITY), options.plots / f"real-table-{length}.png"
                )
            yield Measured({"settings": described, "kept": figures})
    for length in options.lens:
        show(worth_table(figures, length, options.shares, BY_QUALITY))
        if tasks[0] in CHANGED_FACTS:
            show(recall_table(figures, length, options.shares))
    show(quality_table(figures, BY_QUALITY))
    show(cheapest_table(figures, QUALITY, BY_QUALITY))


def asked_for(flag: str, known: Sequence[str], asked: Sequence[str] | None) -> list[str]:
    """Return the names asked for, or all. Raises UsageError for an unknown one."""
    for name in asked or ():
        if name not in known:
            raise UsageError(flag, f"some of {', '.join(known)}", name)
    return list(asked or known)


def measure(
    bench: Bench, records: Records, tasks: Sequence[str], length: int, options: Options,
    progress: Progress,
) -> None:  # fmt: skip
    """Measure whatever is not yet in `records`, context by context."""
    setup = bench.setup
    count = options.contexts * len(tasks)
    if options.transcripts is None:
        is_changed = tasks[0] in CHANGED_FACTS
        make = changed_facts(str(options.model_path)) if is_changed else setup.tasks.make
        samples = make_samples(make, tasks, count, [length], options.seed, HELD_OUT)
    else:
        tokenizer = Tokenizer(str(options.model_path))
        whole = length + OUT_TOKENS * len(OUT_PLACES) * int(options.elided)
        samples = of_transcripts(options.transcripts, tokenizer, whole, count)
    others = [samples[i - 1].context_ids[: length // 2] for i in range(count)]
    if options.elided:
        both = (elided(sample, OUT_PLACES, OUT_TOKENS) for sample in samples)
        samples, others = map(list, zip(*both, strict=True))
    names = {index: f"{length}-{index:03d}" for index in range(count)}
    asked = ", ".join(f"{share:g}" for share in bench.shares)
    pressed = " ".join(["presses", *(options.presses or ())])
    by = [*bench.settings, *([pressed] if options.kvpress_python else [])]
    finished = (f"{DONE} {asked} by {', '.join(by)}", 0.0)
    missing = [i for i in range(count) if (length, i, *finished) not in records]
    contexts = {names[i]: samples[i].context_ids for i in missing}
    folder = options.state / "-".join([*pressed.split(), f"{length}", *asked.split(", ")])
    if options.kvpress_python is not None:
        press(
            options.kvpress_python, options.model_path, folder, contexts, bench.shares,
            options.presses,
        )  # fmt: skip
    began = time.perf_counter()
    for done, index in enumerate(missing):
        sample = samples[index]
        progress(f"{length} tokens, {sample.task}", done, len(missing))
        masks = folder / f"{names[index]}.npz" if options.kvpress_python else None
        measure_context(bench, records, (length, index), sample, others[index], masks)
        records.add((length, index, *finished), {})
        if done == 0:
            minutes = (time.perf_counter() - began) * len(missing) / 60
            print(f"{length} tokens: about {minutes:.0f} minutes", file=sys.stderr)
    progress(f"{length} tokens", len(missing), len(missing))


def measure_context(
    bench: Bench, records: Records, place: tuple[int, int], sample: CalibrationSample,
    others_ids: Sequence[int], masks: Path | None,
) -> None:  # fmt: skip
    """Measure all ways to hold a context. masks: what presses keep of it."""
    context = Context(bench.model, shape_of(bench.model), sample)
    asker = Asker(bench.model, sample)
    shape = context.shape
    held_by_all = shape.num_layers * shape.num_kv_heads * context.num_tokens

    def measure(name: str, share: float, kept: Kept) -> None:
        quality = asker.quality(kept.layers, kept.refresh)
        used = entries(kept.layers, shape.group_size) if kept.used is None else kept.used
        figures = {**quality._asdict(), "bytes": used / held_by_all}
        records.add((*place, name, share), figures)

    for name, share, kept in ways(bench, context, masks):
        if (*place, name, share) not in records:
            measure(name, share, kept)
    for course, share in product(COURSES, bench.shares):
        if course.name in bench.settings and (*place, course.name, share) not in records:
            worth = bench.calibrated.worth
            case = Case(bench.model, sample.context_ids, others_ids, share, worth)
            measure(course.name, share, course.held(case))


def ways(bench: Bench, context: Context, masks: Path | None) -> Iterator[tuple[str, float, Kept]]:
    """Yield the ways to hold a context that came in one turn, each made when it is asked for: its
    name, the share of the bytes, and what is held."""
    shape, tokens = context.shape, context.num_tokens
    every, worth = (shape.num_layers, shape.num_kv_heads, tokens), bench.calibrated.worth

    def chosen(mask: Tensor) -> Kept:
        return Kept(selected(context.kv, mask, shape.group_size))

    yield FULL, 1.0, chosen(ends(every, tokens, 0))
    yield NONE, 0.0, chosen(ends(every, *EDGES))
    for share in bench.shares:
        for setting in settings_at(share):
            if setting.name in bench.settings:
                with suppress(NoRoomError):
                    yield setting.name, share, Keeper(context, bench.order, setting, worth).kept()
    keeper = Keeper(context, bench.order, by_quality(bench, context), worth)
    yield BY_QUALITY, QUALITY, keeper.kept()
    for (press_name, share), mask in (read_masks(masks, every) if masks else {}).items():
        if share in bench.shares:
            yield press_name.removesuffix("Press"), share, chosen(mask)


def by_quality(bench: Bench, context: Context) -> Setting:
    """Return the setting by which a context keeps the share that the curve says; its ends stay in
    any case."""
    share = bench.calibrated.curve.retention(QUALITY, context.nll)
    tokens = context.num_tokens
    edges = (ADAPTIVE_RULE.sink_tokens + ADAPTIVE_RULE.recent(tokens)) / tokens
    return adaptive_setting(BY_QUALITY, edges + share * (1 - edges))


def ends(shape: tuple[int, int, int], first: int, last: int) -> Tensor:
    """Return a bool mask of that shape, True for so many tokens at both ends."""
    token = torch.arange(shape[-1])
    return ((token < first) | (token >= shape[-1] - last)).expand(shape)


def compare(
    records: Records, tasks: Sequence[str], length: int, options: Options
) -> list[dict[str, Any]]:
    """Return one row per share of the bytes and way, where all contexts were measured."""
    full, none = (
        losses(records, length, way, tasks, options) for way in ((FULL, 1.0), (NONE, 0.0))
    )
    assert full is not None, "every context measures it"
    assert none is not None, "every context measures it"
    rows = []
    ways = [(name, share) for share in options.shares for name in records.names(length, share)]
    for name, share in dict.fromkeys([*ways, (BY_QUALITY, QUALITY)]):
        mine = losses(records, length, (name, share), tasks, options)
        if mine is None:
            continue
        measured = [
            records[length, index, name, share] for index in range(options.contexts * len(tasks))
        ]
        used = [one["bytes"] for one in measured]
        rows.append({
            "length": length, "share": share, "way": name,
            "bytes": float(np.mean(used)), "most_bytes": max(used), "least_bytes": min(used),
            "quality": float(np.mean((full + ANSWER_FLOOR_NATS) / (mine + ANSWER_FLOOR_NATS))),
            "recall": float(np.mean([one["recall"] for one in measured])),
            "all": kept_worth(mine, full, none)._asdict(),
            "tasks": {
                task: kept_worth(mine[[i]], full[[i]], none[[i]])._asdict()
                for i, task in enumerate(tasks)
            },
        })  # fmt: skip
    return rows


def losses(
    records: Records, length: int, way: tuple[str, float], tasks: Sequence[str], options: Options
) -> Losses | None:
    """Return a way's losses, `[tasks, contexts]`, or None where some context has no room for it."""
    keys = [(length, index, *way) for index in range(options.contexts * len(tasks))]
    if any(key not in records for key in keys):
        return None
    # The tasks took turns.
    row = np.array([records[key]["loss"] for key in keys])
    return row.reshape(options.contexts, len(tasks)).T


BENCHMARK = Benchmark("real.table", __doc__, declare, run, out=RESULTS / "real-table.json")
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
