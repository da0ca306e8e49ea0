"""Calibrate a model's heads: samples, scores, selection, verification, profile file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import SizeError, UsageError
from kvtier.heads.base import (
    CalibrationSample,
    HeadMethod,
    Progress,
    Selection,
    Target,
    make_method,
    no_progress,
)
from kvtier.heads.model_config import (
    check_splittable,
    context_length,
    model_shape,
    read_config,
    weights_revision,
)
from kvtier.heads.policy import DEFAULT_RULE
from kvtier.heads.probe import HeadProbe, ProbeBatch, middle_of
from kvtier.heads.profile import HeadProfile
from kvtier.heads.samples import HELD_OUT, make_samples, maker_for
from kvtier.heads.verify import Verification, verify
from kvtier.retention.locality import LocalityRule
from kvtier.sizes import format_size

DEFAULT_LENGTHS = (4096,)
DEFAULT_SAMPLES = 4
QUESTION_ROOM_TOKENS = 128


@dataclass(frozen=True)
class Calibrated:
    """A stored profile and what was measured before it was stored, per context length."""

    profile: HeadProfile
    verifications: tuple[Verification, ...]


def calibrate_heads(
    model_path: str,
    method: str,
    out: Path,
    *,
    target: Target,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    samples: int = DEFAULT_SAMPLES,
    seed: int = 0,
    rule: LocalityRule = DEFAULT_RULE,
    progress: Progress = no_progress,
) -> Calibrated:
    """Find the CA heads of a local model, measure what they cost, and write the profile to `out`.

    lengths:  context lengths in tokens, `samples` contexts each; the cost is measured at each
    rule:     what a locality head keeps; the costs hold for this rule only

    Raises UsageError, naming the argument, before anything heavy starts.
    """
    chosen = make_method(method)
    chosen.check_target(target)
    if not out.parent.is_dir():
        raise UsageError("--out", "a file in an existing directory", str(out))
    check_model(model_path, lengths, rule)
    maker, tasks = maker_for(model_path)
    calibration = make_samples(maker, tasks, samples, lengths, seed)
    held_out = make_samples(maker, tasks, samples, lengths, seed, HELD_OUT)
    progress("loading the model", 0, 1)
    probe = HeadProbe(load_model(model_path), rule)
    progress("loading the model", 1, 1)

    selection = choose(chosen, probe, calibration, target, progress)
    profile = HeadProfile(
        model=Path(model_path).resolve().name,
        revision=weights_revision(model_path),
        shape=probe.shape,
        method=method,
        ca_heads=selection.ca_heads,
        scores=selection.scores,
    )
    found = tuple(
        verify(
            prepare(probe, [s for s in held_out if len(s.context_ids) == length], progress),
            profile, seed, progress=progress,
        )
        for length in lengths
    )  # fmt: skip
    parameters = {
        **selection.parameters,
        "share": target.share,
        "budget": target.budget,
        "lengths": list(lengths),
        "contexts_per_length": samples,
        "seed": seed,
        "tasks": list(tasks),
        "sink_tokens": rule.sink_tokens,
        "recent_tokens": rule.recent_tokens,
        "compensation": rule.compensation,
        "control": [verification.control() for verification in found],
    }
    costs = tuple(cost for verification in found for cost in verification.costs())
    profile = profile.model_copy(update={"costs": costs, "parameters": parameters})
    profile.save(out)
    return Calibrated(profile, found)


def choose(
    method: HeadMethod,
    probe: HeadProbe,
    samples: Sequence[CalibrationSample],
    target: Target,
    progress: Progress,
) -> Selection:
    """Score and select; the samples' KV is freed on return."""
    batches = prepare(probe, samples, progress)
    scores = method.score(batches, progress)
    return method.select(scores, batches, target, progress)


def prepare(
    probe: HeadProbe, samples: Sequence[CalibrationSample], progress: Progress
) -> list[ProbeBatch]:
    """Prefill every sample's context."""
    batches = []
    for done, sample in enumerate(samples):
        progress("prefilling contexts", done, len(samples))
        batches.append(probe.prepare(sample))
    progress("prefilling contexts", len(samples), len(samples))
    return batches


def check_model(model_path: str, lengths: Sequence[int], rule: LocalityRule) -> None:
    """Raise UnsupportedModelError or SizeError for what cannot be calibrated."""
    config = read_config(model_path)
    check_splittable(config)
    model_shape(config)
    longest = context_length(config)
    if not lengths or len(set(lengths)) != len(lengths):
        raise SizeError("--len", "different context lengths", list(lengths))
    for length in lengths:
        middle_of(length, rule)
    if longest and max(lengths) > longest:
        raise SizeError(
            "--len", f"at most {format_size(longest)} tokens", format_size(max(lengths))
        )


def load_model(model_path: str) -> Any:
    """A transformers causal LM: on the GPU in its own dtype, or on the CPU in float32."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    on_gpu = torch.cuda.is_available()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype="auto" if on_gpu else torch.float32
        )
    except (OSError, ValueError) as error:
        raise UsageError("--model-path", "a model that transformers loads", model_path) from error
    return model.to("cuda" if on_gpu else "cpu").eval()


def summary(result: Calibrated) -> list[str]:
    """What was found, in a few lines for people."""
    profile = result.profile
    total = profile.shape.num_layers * profile.shape.num_kv_heads
    names = [f"{layer}.{head}" for layer, row in enumerate(profile.ca_heads) for head in row]
    shown = " ".join(names) if len(names) <= 32 else f"{' '.join(names[:32])} …"
    lines = [
        f"{profile.method}: {profile.num_ca_heads} of {total} KV heads keep the context "
        f"({profile.ca_share:.0%}): {shown}"
    ]
    for found in result.verifications:
        lines.append(
            f"recall at {format_size(found.context_tokens)}: {found.profile.recall:.1%}   "
            f"full {found.full.recall:.1%}   random heads {found.random.recall:.1%}   "
            f"no heads {found.window.recall:.1%}   ({found.answers} answers)"
        )
        budget = profile.parameters.get("budget")
        if budget is not None and found.full.recall - found.profile.recall > budget:
            lines.append(
                f"  over the budget of {budget:.1%} on samples it was not chosen on: "
                "calibrate with more --samples"
            )
    return lines


@contextmanager
def rich_progress() -> Iterator[Progress]:
    """One live bar on standard error, named by what is being done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bars(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("calibration")

        def report(stage: str, done: int, total: int) -> None:
            bars.update(task, description=stage, completed=done, total=total)

        yield report
