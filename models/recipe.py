"""The stages of training, in order, with everything that is random named by a seed."""

from __future__ import annotations

from dataclasses import dataclass

SEED = 20261120

# (layer, kv_head) of the CA heads that the last stages specialise: the ones that backward
# elimination left after the stages before them.
ANCHORED: tuple[tuple[int, int], ...] = ((1, 0), (1, 1), (1, 2))


@dataclass(frozen=True)
class Stage:
    """A stretch of training with one kind of data.

    tokens, batch:   shape of a step's batch
    max_steps:       hard end
    stop_accuracy:   early end, once the running answer accuracy (per token) reaches it
    max_span:        see `models.batches.SessionShape`
    periodic_share:  share of steps that train on periodic sequences instead
    split_share:     share of the recall steps in which only `ANCHORED` heads keep the middle
    real_tokens:     longest real context (see `models.grounding`), log-uniform from 4k; 0: none
    split_weight:    weight of the real contexts' loss under the split policy; the full one is 1
    near_miss_share: share of the real contexts with shared names, and again with few codes
    language:        train the last MLP alone, on what follows filler (see `models.language`)
    """

    name: str
    tokens: int
    batch: int
    max_steps: int
    lr_start: float
    lr_end: float
    stop_accuracy: float = 1.1
    min_steps: int = 40
    max_span: int = 0
    periodic_share: float = 0.25
    context_weight: float = 0.0
    turn_share: float = 0.4
    fact_density: float = 0.7
    few_codes_share: float = 0.0
    split_share: float = 0.0
    real_tokens: int = 0
    split_weight: float = 1.0
    near_miss_share: float = 0.0
    language: bool = False


STAGES: tuple[Stage, ...] = (
    Stage("copy-64", 64, 64, 1200, 3e-3, 3e-3, stop_accuracy=0.92, periodic_share=1.0),
    Stage("recall-64", 64, 64, 800, 3e-3, 2e-3, stop_accuracy=0.93),
    Stage("recall-128", 128, 32, 600, 2e-3, 1.5e-3, stop_accuracy=0.95),
    Stage("recall-256", 256, 16, 500, 1.5e-3, 1.5e-3, stop_accuracy=0.96),
    Stage("recall-512", 512, 8, 400, 1.5e-3, 1e-3, stop_accuracy=0.97),
    Stage(
        "span-4k", 512, 8, 400, 1e-3, 1e-3, stop_accuracy=0.975, max_span=4096, periodic_share=0.1
    ),
    Stage(
        "span-32k", 512, 8, 400, 1e-3, 1e-3, stop_accuracy=0.98, max_span=32768, periodic_share=0.1
    ),
    Stage(
        "span-136k",
        512,
        8,
        800,
        1e-3,
        5e-4,
        stop_accuracy=0.985,
        max_span=139000,
        periodic_share=0.1,
    ),
    Stage(
        "dense-136k",
        512,
        8,
        700,
        1.2e-3,
        8e-4,
        max_span=138000,
        periodic_share=0.1,
        fact_density=0.95,
        few_codes_share=0.6,
        split_share=0.2,
    ),
    Stage(
        "long-1k",
        1024,
        4,
        480,
        8e-4,
        4e-4,
        max_span=137000,
        periodic_share=0.05,
        turn_share=0.5,
        context_weight=0.02,
        fact_density=0.95,
        few_codes_share=0.5,
        split_share=0.35,
    ),
    Stage(
        "final-1k",
        1024,
        4,
        220,
        4e-4,
        2e-5,
        max_span=136000,
        periodic_share=0.0,
        turn_share=0.35,
        context_weight=0.02,
        fact_density=0.95,
        few_codes_share=0.3,
        split_share=0.35,
    ),
    Stage(
        "ground-24k",
        1024,
        4,
        110,
        2e-4,
        2e-5,
        max_span=136000,
        periodic_share=0.0,
        turn_share=0.35,
        context_weight=0.02,
        fact_density=0.95,
        few_codes_share=0.3,
        split_share=0.5,
        real_tokens=24576,
    ),
    Stage(
        "near-16k",
        1024,
        4,
        240,
        6e-4,
        2e-5,
        max_span=136000,
        periodic_share=0.0,
        turn_share=0.35,
        context_weight=0.02,
        fact_density=0.95,
        few_codes_share=0.5,
        split_share=0.5,
        real_tokens=16384,
        split_weight=2.0,
        near_miss_share=0.4,
    ),
    Stage(
        "language",
        1024,
        4,
        4000,
        1e-2,
        5e-5,
        max_span=136000,
        turn_share=0.5,
        fact_density=0.95,
        few_codes_share=0.5,
        real_tokens=24576,
        language=True,
    ),
)


def stage_named(name: str) -> Stage:
    """The stage called `name`; KeyError names the valid ones."""
    for stage in STAGES:
        if stage.name == name:
            return stage
    raise KeyError(f"unknown stage {name!r}; stages: {', '.join(stage.name for stage in STAGES)}")
