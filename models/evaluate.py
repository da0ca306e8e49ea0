"""Measure recall by length and head policy.

    python -m models.evaluate --model models/kvtier-demo --len 4k,32k,128k --heads full,window
    python -m models.evaluate --model models/kvtier-demo --len 4k --find 3
    … --heads 1.0+1.3+2.2        # CA heads as layer.kv_head

Contexts are prefilled exactly (full causal attention, in chunks); the policy acts on what the turns
see of the context.  Turns are teacher-forced: an answer is right when every token of it is the
argmax, which is when greedy decoding writes the same answer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvtier.sizes import parse_size
from kvtier.synthetic.recall import ANSWER_TOKENS, FACT_TOKENS, Session, make_session
from models.longcontext import ContextCache, prefill, turn_hidden
from models.net import Net, load_net

Head = tuple[int, int]


@dataclass(frozen=True)
class Recall:
    """Shares over all judged answers: whole answers right, and code tokens right."""

    strict: float
    codes: float
    answers: int


@dataclass(frozen=True)
class Probe:
    """A prefilled context with its turns; `right` marks the answer tokens that can be known."""

    session: Session
    cache: ContextCache
    turn_ids: Tensor
    marks: Tensor


def make_probe(
    net: Net, seed: int, context_tokens: int, num_turns: int, invented_share: float = 0.2
) -> Probe:
    """A seeded session, prefilled exactly."""
    rng = np.random.default_rng(seed)
    # A fact asked twice could be answered from the earlier turn, which no policy drops.
    num_facts = min(max(num_turns, int(rng.integers(8, 65))), context_tokens // (2 * FACT_TOKENS))
    session = make_session(rng, context_tokens, num_turns, num_facts, invented_share=invented_share)
    turn_ids, marks = session.answered_ids(rng)
    cache = prefill(net, torch.from_numpy(session.context_ids))
    return Probe(session, cache, torch.tensor(turn_ids), torch.tensor(marks))


def head_mask(net: Net, heads: Iterable[Head]) -> Tensor:
    """Bool `[layers, kv_heads]`, True at the given (layer, kv_head) pairs."""
    mask = torch.zeros(net.config.num_layers, net.config.num_kv_heads, dtype=torch.bool)
    for layer, head in heads:
        mask[layer, head] = True
    return mask


def all_heads(net: Net) -> list[Head]:
    """Every (layer, kv_head)."""
    return list(itertools.product(range(net.config.num_layers), range(net.config.num_kv_heads)))


@torch.no_grad()
def measure(net: Net, probes: Iterable[Probe], heads: Iterable[Head]) -> Recall:
    """Recall of facts of the context over all probes, with `heads` as the CA heads."""
    anchored = head_mask(net, heads)
    hits, wholes = [], []
    for probe in probes:
        hidden = turn_hidden(net, probe.cache, probe.turn_ids, anchored)
        right = torch.zeros(len(probe.turn_ids), dtype=torch.bool)
        right[1:] = net.logits(hidden[:-1]).argmax(-1) == probe.turn_ids[1:]
        for answer in judged_answers(probe, right):
            hits.append(answer[2:-1].float().mean().item())
            wholes.append(bool(answer.all()))
    return Recall(float(np.mean(wholes)), float(np.mean(hits)), len(wholes))


def judged_answers(probe: Probe, right: Tensor) -> list[Tensor]:
    """Return for each turn that first asks for a fact of the context which of its 11 tokens are
    right."""
    answers = []
    asked = set()
    end = 0
    for turn in probe.session.turns:
        end += len(turn.prompt_ids) + ANSWER_TOKENS
        if turn.fact_position is not None and turn.name not in asked:
            asked.add(turn.name)
            answers.append(right[end - ANSWER_TOKENS : end])
    return answers


def eliminate(net: Net, probes: list[Probe], keep: int) -> list[tuple[list[Head], float]]:
    """Greedy backward elimination: drop the least missed head until `keep` remain.

    Returns the surviving heads and their share of right code tokens after every drop.
    """
    heads = all_heads(net)
    path = []
    while len(heads) > keep:
        trials = []
        for head in heads:
            rest = [other for other in heads if other != head]
            trials.append((measure(net, probes, rest).codes, rest))
        score, heads = max(trials, key=lambda trial: trial[0])
        path.append((heads, score))
    return path


def sensitivity(net: Net, probes: list[Probe]) -> dict[Head, float]:
    """Share of right code tokens when one KV head alone loses its middle context."""
    heads = all_heads(net)
    return {
        head: measure(net, probes, [other for other in heads if other != head]).codes
        for head in heads
    }


def random_heads(net: Net, count: int, draws: int, seed: int = 0) -> list[list[Head]]:
    """`draws` random choices of `count` heads."""
    rng = np.random.default_rng(seed)
    heads = all_heads(net)
    return [[heads[i] for i in rng.permutation(len(heads))[:count]] for _ in range(draws)]


def parse_heads(text: str) -> list[Head]:
    """`1.0+2.3` → [(1, 0), (2, 3)]."""
    pairs = (item.split(".") for item in text.split("+"))
    return [(int(layer), int(head)) for layer, head in pairs]


def policies(net: Net, text: str) -> dict[str, list[list[Head]]]:
    """Named policies, each with one or more head choices (random ones are averaged)."""
    known: dict[str, list[list[Head]]] = {}
    for item in text.split(","):
        if item == "full":
            known[item] = [all_heads(net)]
        elif item == "window":
            known[item] = [[]]
        elif item.startswith("random"):
            known[item] = random_heads(net, int(item.removeprefix("random")), draws=8)
        else:
            known[item] = [parse_heads(item)]
    return known


def format_heads(heads: Iterable[Head]) -> str:
    """Inverse of `parse_heads`."""
    return "+".join(f"{layer}.{head}" for layer, head in heads)


def say(**fields: object) -> None:
    """Print a line of JSON at once."""
    print(json.dumps(fields), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--len", default="1k,4k", help="context lengths")
    parser.add_argument("--heads", default="full,random3,window", help="policies")
    parser.add_argument(
        "--find", type=int, help="eliminate down to this many heads and print the path"
    )
    parser.add_argument("--contexts", type=int, default=2)
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    net = load_net(options.model)
    for length in options.len.split(","):
        started = time.perf_counter()
        seeds = range(options.seed, options.seed + options.contexts)
        probes = [make_probe(net, s, parse_size(length, "--len"), options.turns) for s in seeds]
        say(len=length, prefill_s=round(time.perf_counter() - started, 1))
        for name, choices in policies(net, options.heads).items():
            found = [measure(net, probes, heads) for heads in choices]
            strict, codes = (
                float(np.mean([getattr(r, f) for r in found])) for f in ("strict", "codes")
            )
            say(
                len=length, heads=name, strict=round(strict, 4), codes=round(codes, 4),
                answers=found[0].answers,
            )  # fmt: skip
        if options.find:
            for head, score in sensitivity(net, probes).items():
                say(len=length, dropped=format_heads([head]), codes=round(score, 4))
            for heads, score in eliminate(net, probes, options.find):
                say(len=length, keep=len(heads), heads=format_heads(heads), codes=round(score, 4))


if __name__ == "__main__":
    main()
