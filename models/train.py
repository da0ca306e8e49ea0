"""Train the demo model: `OMP_NUM_THREADS=1 python -m models.train --out models/kvtier-demo`.

One CPU thread is enough.  Every stage is seeded by its name and writes a checkpoint to the
work folder, so a run can be resumed at any stage.  A model folder can be resumed too.  It holds no
optimizer state; the language stage needs none, so it comes out the same from the weights before it:

    python -m models.train --resume MODEL_FOLDER --stages language --out build/language
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from kvtier.synthetic.recall import DEFAULT_LANGUAGE
from models.batches import Batch, SessionShape, periodic_batch, session_batch
from models.export import HISTORY, export
from models.grounding import exercise_loss, make_exercise
from models.language import collect_residuals, language_loss, only_last_mlp
from models.net import Net, NetConfig, load_net
from models.recipe import ANCHORED, SEED, STAGES, Stage, stage_named

LOG_EVERY, MOST_ENTRIES = 10, 60  # steps between entries of the log, most entries of a stage
RUNNING = 0.95  # decay of the running accuracy
SHORTEST_REAL_TOKENS, REAL_TURNS = 4096, 48


def make_batch(rng: np.random.Generator, stage: Stage) -> tuple[Batch, str]:
    """A batch of the stage and its kind: `copy`, `recall` or `split`."""
    if rng.random() < stage.periodic_share:
        tokens = min(stage.tokens, 256)
        return periodic_batch(rng, tokens, stage.batch * stage.tokens // tokens), "copy"
    split = stage.split_share > 0 and bool(rng.random() < stage.split_share)
    shape = session_shape(stage, anchored_mask() if split else None)
    return session_batch(rng, shape), "split" if split else "recall"


def session_shape(stage: Stage, anchored: torch.Tensor | None) -> SessionShape:
    """The recall batches of a stage, under a head policy or with every head."""
    return SessionShape(
        stage.tokens,
        stage.batch,
        stage.max_span,
        stage.context_weight,
        stage.turn_share,
        stage.fact_density,
        stage.few_codes_share,
        anchored,
    )


def anchored_mask() -> torch.Tensor:
    """`ANCHORED` as bool `[layers, kv_heads]`."""
    config = NetConfig()
    mask = torch.zeros(config.num_layers, config.num_kv_heads, dtype=torch.bool)
    for layer, head in ANCHORED:
        mask[layer, head] = True
    return mask


def batch_loss(net: Net, batch: Batch) -> tuple[torch.Tensor, float]:
    """Weighted next-token loss, and the share of answer tokens predicted right."""
    hidden = net.hidden(batch.ids, batch.positions, batch.bias, batch.split)
    weights, targets = batch.weights[:, 1:], batch.ids[:, 1:]
    chosen = weights > 0
    logits = net.logits(hidden[:, :-1][chosen])
    losses = functional.cross_entropy(logits, targets[chosen], reduction="none")
    loss = (losses * weights[chosen]).sum() / batch.is_answer.sum()
    scored = batch.is_answer[:, 1:][chosen]
    hits = (logits.argmax(-1) == targets[chosen])[scored]
    return loss, hits.float().mean().item()


def grounded_loss(
    net: Net, rng: np.random.Generator, stage: Stage
) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss of turns over one real context, with the CA heads alone and with every head."""
    low, high = np.log(SHORTEST_REAL_TOKENS), np.log(stage.real_tokens)
    exercise = make_exercise(
        net,
        rng,
        int(np.exp(rng.uniform(low, high))),
        REAL_TURNS,
        shared_words=_happens(rng, stage.near_miss_share),
        few_codes=_happens(rng, stage.near_miss_share),
    )
    anchored = anchored_mask()
    split, split_accuracy = exercise_loss(net, exercise, anchored)
    full, full_accuracy = exercise_loss(net, exercise, torch.ones_like(anchored))
    return stage.split_weight * split + full, {
        "real split": split_accuracy,
        "real full": full_accuracy,
    }


def _happens(rng: np.random.Generator, share: float) -> bool:
    """A draw that costs no randomness where it cannot happen."""
    return share > 0 and bool(rng.random() < share)


Lesson = Callable[[], tuple[torch.Tensor, dict[str, float]]]


def recall_lesson(net: Net, rng: np.random.Generator, stage: Stage) -> Lesson:
    """Every weight learns from a fresh batch."""

    def lesson() -> tuple[torch.Tensor, dict[str, float]]:
        batch, kind = make_batch(rng, stage)
        loss, accuracy = batch_loss(net, batch)
        seen = {kind: accuracy}
        if stage.real_tokens:
            grounded, accuracies = grounded_loss(net, rng, stage)
            loss, seen = loss + grounded, seen | accuracies
        return loss, seen

    return lesson


def language_lesson(net: Net, rng: np.random.Generator, stage: Stage) -> Lesson:
    """The last MLP learns from what enters it, which is computed here, once."""
    shape = session_shape(stage, anchored=None)
    residuals = collect_residuals(net, rng, shape, anchored_mask(), stage.real_tokens)
    return lambda: language_loss(net, rng, residuals)


def run_stage(
    net: Net, optimizer: torch.optim.Optimizer, stage: Stage, log: list[dict[str, Any]]
) -> None:
    """Train until `stage.stop_accuracy` or `stage.max_steps`."""
    rng = np.random.default_rng([SEED, zlib.crc32(stage.name.encode())])
    started = time.perf_counter()
    lesson = (language_lesson if stage.language else recall_lesson)(net, rng, stage)
    log_every = max(LOG_EVERY, stage.max_steps // MOST_ENTRIES)
    running: dict[str, float] = {}
    counts: dict[str, int] = {}
    watched = "recall" if stage.periodic_share < 1.0 else "copy"
    for step in range(stage.max_steps):
        rate = stage.lr_start + (stage.lr_end - stage.lr_start) * step / stage.max_steps
        warm = min(1.0, (step + 1) / 20)
        for group in optimizer.param_groups:
            group["lr"] = rate * warm
        loss, seen = lesson()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for name, value in seen.items():
            counts[name] = counts.get(name, 0) + 1
            # Bias-corrected, so that the first steps count fully.
            decay = min(RUNNING, 1 - 1 / counts[name])
            running[name] = decay * running.get(name, 0.0) + (1 - decay) * value
        done = step + 1 >= stage.min_steps and running.get(watched, 0.0) >= stage.stop_accuracy
        if (step + 1) % log_every == 0 or done or step + 1 == stage.max_steps:
            entry = {
                "stage": stage.name,
                "step": step + 1,
                "loss": round(loss.item(), 4),
                **{name: round(value, 4) for name, value in sorted(running.items())},
                "seconds": round(time.perf_counter() - started, 1),
            }
            log.append(entry)
            print(json.dumps(entry), flush=True)
        if done:
            break


@dataclass
class Run:
    """The state that training changes: weights, optimizer state, and the log of all steps."""

    net: Net
    optimizer: torch.optim.Optimizer
    log: list[dict[str, Any]]

    def state(self) -> dict[str, Any]:
        """The run as a checkpoint."""
        return {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "log": self.log,
        }


def make_optimizer(net: Net) -> torch.optim.Optimizer:
    """AdamW without history; it leaves frozen weights as they are, weight decay included."""
    return torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)


def start(resume: Path | None) -> Run:
    """A new run, or one that goes on from a checkpoint (.pt) or from an exported model folder."""
    if resume is not None and resume.is_dir():
        net = load_net(resume)
        return Run(net, make_optimizer(net), json.loads((resume / HISTORY).read_text())["steps"])
    net = Net(NetConfig(vocab_size=DEFAULT_LANGUAGE.vocab_size))
    run = Run(net, make_optimizer(net), [])
    if resume is not None:
        saved = torch.load(resume, weights_only=False)
        net.load_state_dict(saved["net"])
        run.optimizer.load_state_dict(saved["optimizer"])
        run.log = saved["log"]
    return run


def train(run: Run, stage: Stage) -> None:
    """Run one stage with the weights that it trains."""
    if not stage.language:
        run_stage(run.net, run.optimizer, stage, run.log)
        return
    # Moments of other losses would only mislead, and a model folder has none.
    run.optimizer = make_optimizer(run.net)
    with only_last_mlp(run.net):
        run_stage(run.net, run.optimizer, stage, run.log)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the finished model")
    parser.add_argument("--work", type=Path, default=Path("build/demo-model"), help="checkpoints")
    parser.add_argument("--stages", default="", help="comma-separated names; default all")
    parser.add_argument(
        "--resume", type=Path, help="checkpoint (.pt) or model folder to start from"
    )
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    options.work.mkdir(parents=True, exist_ok=True)
    run = start(options.resume)
    names = [name for name in options.stages.split(",") if name]
    for stage in [stage_named(name) for name in names] or STAGES:
        train(run, stage)
        torch.save(run.state(), options.work / f"{stage.name}.pt")
    export(run.state(), options.out)


if __name__ == "__main__":
    main()
