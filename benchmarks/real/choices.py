"""The heads that every method chooses, once and on the same contexts; kept beside the records."""

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
    """order: every head, best first; seconds: scoring and ranking, without the prefill."""

    method: str
    order: tuple[Head, ...]
    seconds: float


@dataclass(frozen=True)
class Setup:
    """A model, its tasks, and what every method chooses on."""

    model_path: Path
    tasks: Tasks
    length: int
    contexts: int
    seed: int

    @classmethod
    def of(cls, model_path: Path, length: int, contexts: int, seed: int) -> Setup:
        """Raises UsageError for a model that is not there."""
        return cls(model_path, tasks_for(str(model_path)), length, contexts, seed)

    def described(self) -> dict[str, Any]:
        """What records are kept under; reads all weights for their digest."""
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
        """The model. Raises UsageError and UnsupportedModelError."""
        return load_model(str(self.model_path))


def chosen_heads(
    setup: Setup, methods: Sequence[str], records: Records, probe: HeadProbe, progress: Progress
) -> list[Choice]:
    """What each method chooses, or chose before. Raises UsageError for an unknown method."""
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
    """The method, with the run's seed where it draws. Raises UsageError."""
    seeded = name in METHODS and METHODS[name].takes_seed
    return make_method(name, **({"seed": setup.seed} if seeded else {}))


__all__ = ["Choice", "Setup", "chosen_heads"]
