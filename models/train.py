"""Train the demo model: `OMP_NUM_THREADS=1 python -m models.train --out models/kvtier-demo`.

One CPU thread is enough.  Every stage is seeded by its name and writes a checkpoint to the
work folder, so a run can be resumed at any stage.
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from kvtier.bench.recall import DEFAULT_LANGUAGE
from models.batches import Batch, SessionShape, periodic_batch, session_batch
from models.export import export
from models.grounding import exercise_loss, make_exercise
from models.net import Net, NetConfig
from models.recipe import ANCHORED, SEED, STAGES, Stage, stage_named

LOG_EVERY = 10
RUNNING = 0.95  # decay of the running accuracy
SHORTEST_REAL_TOKENS, REAL_TURNS = 4096, 48


def make_batch(rng: np.random.Generator, stage: Stage) -> tuple[Batch, str]:
    """A batch of the stage and its kind: `copy`, `recall` or `split`."""
    if rng.random() < stage.periodic_share:
        tokens = min(stage.tokens, 256)
        return periodic_batch(rng, tokens, stage.batch * stage.tokens // tokens), "copy"
    split = stage.split_share > 0 and bool(rng.random() < stage.split_share)
    shape = SessionShape(
        stage.tokens,
        stage.batch,
        stage.max_span,
        stage.context_weight,
        stage.turn_share,
        stage.fact_density,
        stage.few_codes_share,
        anchored_mask() if split else None,
    )
    return session_batch(rng, shape), "split" if split else "recall"


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


def run_stage(
    net: Net, optimizer: torch.optim.Optimizer, stage: Stage, log: list[dict[str, Any]]
) -> None:
    """Train until `stage.stop_accuracy` or `stage.max_steps`."""
    rng = np.random.default_rng([SEED, zlib.crc32(stage.name.encode())])
    started = time.perf_counter()
    running: dict[str, float] = {}
    counts: dict[str, int] = {}
    watched = "recall" if stage.periodic_share < 1.0 else "copy"
    for step in range(stage.max_steps):
        rate = stage.lr_start + (stage.lr_end - stage.lr_start) * step / stage.max_steps
        warm = min(1.0, (step + 1) / 20)
        for group in optimizer.param_groups:
            group["lr"] = rate * warm
        batch, kind = make_batch(rng, stage)
        loss, accuracy = batch_loss(net, batch)
        seen = {kind: accuracy}
        if stage.real_tokens:
            grounded, accuracies = grounded_loss(net, rng, stage)
            loss, seen = loss + grounded, seen | accuracies
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
        if (step + 1) % LOG_EVERY == 0 or done or step + 1 == stage.max_steps:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the finished model")
    parser.add_argument("--work", type=Path, default=Path("build/demo-model"), help="checkpoints")
    parser.add_argument("--stages", default="", help="comma-separated names; default all")
    parser.add_argument("--resume", type=Path, help="checkpoint (.pt) to start from")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    options.work.mkdir(parents=True, exist_ok=True)
    net = Net(NetConfig(vocab_size=DEFAULT_LANGUAGE.vocab_size))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    log: list[dict[str, Any]] = []
    if options.resume:
        saved = torch.load(options.resume, weights_only=False)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        log = saved["log"]
    names = [name for name in options.stages.split(",") if name]
    for stage in [stage_named(name) for name in names] or STAGES:
        run_stage(net, optimizer, stage, log)
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "log": log}
        torch.save(state, options.work / f"{stage.name}.pt")
    export(state, options.out)


if __name__ == "__main__":
    main()
