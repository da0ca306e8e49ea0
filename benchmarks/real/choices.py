"""The heads that every method chooses, once and on the same contexts, kept beside the records."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.real.records import Records
from kvtier.heads.calibrate import prepare
from kvtier.heads.methods import METHODS, make_method
from kvtier.heads.model.config import model_name, weights_revision
from kvtier.heads.model.loading import load_model
from kvtier.heads.probes.context import HeadProbe
from kvtier.heads.profile import Head
from kvtier.heads.progress import Progress
from kvtier.heads.samples.synthetic import CALIBRATION, Tasks, make_samples, tasks_for


@dataclass(frozen=True)
class Choice:
    """The choice of a method. order: every head, best first; seconds: the time of scoring and
    ranking, without the prefill."""

    method: str
    order: tuple[Head, ...]
    seconds: float


@dataclass(frozen=True)
class Setup:
    """A model, its tasks, and the contexts on which every method chooses."""

    model_path: Path
    tasks: Tasks
    length: int
    contexts: int
    seed: int

    @classmethod
    def of(cls, model_path: Path, length: int, contexts: int, seed: int) -> Setup:
        """Return the setup of a model, with its tasks. Raises UsageError where there is no such
        model."""
        return cls(model_path, tasks_for(str(model_path)), length, contexts, seed)

    def described(self) -> dict[str, Any]:
        """Return the settings that records are kept under; reads all weights for their digest."""
        return {
            "model": model_name(str(self.model_path)),
            "revision": weights_revision(str(self.model_path)),
            "tasks": list(self.tasks.measuring),
            "chosen_on": {
                "tasks": list(self.tasks.choosing),
                "context_tokens": self.length,
                "contexts": self.contexts,
            },
            "seed": self.seed,
        }

    def load(self) -> Any:
        """Load the model. Raises UsageError and UnsupportedModelError."""
        return load_model(str(self.model_path))


def chosen_heads(
    setup: Setup, methods: Sequence[str], records: Records, probe: HeadProbe, progress: Progress
) -> list[Choice]:
    """Return the choice of each method, made now or read from a run before. Raises UsageError for
    an unknown method."""
    files = {method: records.directory / f"choice-{method}.json" for method in methods}
    missing = {method: make(setup, method) for method, file in files.items() if not file.exists()}
    if missing:
        samples = make_samples(
            setup.tasks.make, setup.tasks.choosing, setup.contexts, [setup.length], setup.seed,
            CALIBRATION,
        )  # fmt: skip
        batches = prepare(probe, samples, progress)
        for name, method in missing.items():
            began = time.perf_counter()
            order = method.ranking(method.score(batches, progress), probe.shape)
            document = {"seconds": time.perf_counter() - began, "order": order}
            files[name].write_text(json.dumps(document) + "\n")
            for batch in batches:
                batch.forget()
    choices = []
    for method, file in files.items():
        document = json.loads(file.read_text())
        order = tuple((layer, head) for layer, head in document["order"])
        choices.append(Choice(method, order, document["seconds"]))
    return choices


def make(setup: Setup, name: str) -> Any:
    """Make a method, with the run's seed where it draws. Raises UsageError for an unknown name."""
    seeded = name in METHODS and METHODS[name].takes_seed
    return make_method(name, **({"seed": setup.seed} if seeded else {}))


__all__ = ["Choice", "Setup", "chosen_heads"]
