"""The samples that choose the heads and those that measure the choice; made before the model
loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.errors import SizeError
from kvtier.heads.model.config import context_length, read_config
from kvtier.heads.samples.questions import CalibrationSample, middle_of
from kvtier.heads.samples.synthetic import (
    CALIBRATION,
    HELD_OUT,
    JUDGING,
    make_samples,
    tasks_for,
)
from kvtier.heads.samples.users import read_user_samples
from kvtier.retention.locality import LocalityRule
from kvtier.sizes import format_size
from kvtier.synthetic.tokenizer import Tokenizer

Samples = tuple[CalibrationSample, ...]


@dataclass(frozen=True)
class SamplePlan:
    """The samples of a calibration.

    calibration:  samples that heads are chosen on
    judging:      samples that a budget is judged on, neither chosen on nor reported; empty where
                  there are too few for that, and those that were chosen on have to do
    held_out:     samples that the choice is measured on, in groups that are reported apart
    description:  where they come from, as a profile's parameters carry it
    """

    calibration: Samples
    held_out: tuple[Samples, ...]
    judging: Samples = ()
    description: dict[str, Any] = field(default_factory=dict)


def synthetic_plan(
    model_path: str, lengths: Sequence[int], samples: int, seed: int, rule: LocalityRule
) -> SamplePlan:
    """`samples` contexts per length to choose on, the tasks in turn, and as many to measure on, or
    one per task where some are only measured; one held-out group per length.

    Raises SizeError for lengths that the model or the rule cannot take, UsageError for `samples`.
    """
    check_lengths(model_path, lengths, rule)
    tasks = tasks_for(model_path)
    calibration, judging = (
        tuple(make_samples(tasks.make, tasks.choosing, samples, lengths, seed, stream))
        for stream in (CALIBRATION, JUDGING)
    )
    # Tasks that nothing was chosen on are measured, too, however few samples are asked for.
    several = tasks.measuring != tasks.choosing
    count = max(samples, len(tasks.measuring)) if several else samples
    groups = [
        make_samples(tasks.make, tasks.measuring, count, [n], seed, HELD_OUT) for n in lengths
    ]
    return SamplePlan(
        calibration,
        tuple(map(tuple, groups)),
        judging,
        {
            "lengths": list(lengths),
            "contexts_per_length": samples,
            "tasks": list(tasks.choosing),
            "tasks_measured": list(tasks.measuring),
        },
    )


def users_plan(model_path: str, file: Path, rule: LocalityRule) -> SamplePlan:
    """A user's own samples, one held-out group. Raises SamplesFileError naming line and field."""
    tokenizer, longest = Tokenizer(model_path), context_length(read_config(model_path))
    split = read_user_samples(file, tokenizer.encode, tokenizer.first_ids, rule, longest)
    samples = (*split.calibration, *split.held_out)
    return SamplePlan(
        tuple(split.calibration),
        (tuple(split.held_out),),
        description={
            "samples_file": file.name,
            "contexts": [len(split.calibration), len(split.held_out)],
            "lengths": sorted({len(sample.context_ids) for sample in samples}),
            "tasks": sorted({sample.task for sample in samples}),
        },
    )


def check_lengths(model_path: str, lengths: Sequence[int], rule: LocalityRule) -> None:
    """Raise SizeError for context lengths that cannot be calibrated."""
    longest = context_length(read_config(model_path))
    if not lengths or len(set(lengths)) != len(lengths):
        raise SizeError("--len", "different context lengths", list(lengths))
    for length in lengths:
        middle_of(length, rule)
    if longest and max(lengths) > longest:
        raise SizeError(
            "--len", f"at most {format_size(longest)} tokens", format_size(max(lengths))
        )
