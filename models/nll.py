"""Measure what the words of a context cost the model, by word class and by density of facts.

    python -m models.nll --model models/kvtier-demo --len 4k,16k --facts 8,64,256

The mean over all tokens of a context is what kvtier's calibration curves read.  What the language
itself costs: a filler word is one of 4 (ln 4 = 1.39 nats) where it follows filler, and a code is
one of 64 (4.16).  Filler after a fact (`refill`) goes on where the walk stopped before the fact.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvtier.sizes import parse_size
from kvtier.synthetic.recall import DEFAULT_LANGUAGE, make_session
from models.evaluate import say
from models.net import Net, load_net


@torch.no_grad()
def context_nll(net: Net, ids: Tensor) -> Tensor:
    """NLL in nats of `ids[1:]`, `[tokens - 1]`, under full causal attention."""
    hidden = net.hidden(ids[None], torch.arange(len(ids))[None])[0]
    return functional.cross_entropy(net.logits(hidden[:-1]), ids[1:], reduction="none")


def class_masks(ids: Tensor) -> dict[str, Tensor]:
    """Return which of `ids[1:]` are of which class: bool `[tokens - 1]` each."""
    language = DEFAULT_LANGUAGE
    named = {
        "filler": language.filler,
        "codes": language.codes,
        "adjectives": language.adjectives,
        "nouns": language.nouns,
    }
    masks = {name: _within(ids[1:], run) for name, run in named.items()}
    after_filler = _within(ids[:-1], language.filler)
    masks["refill"] = masks["filler"] & ~after_filler
    masks["filler"] = masks["filler"] & after_filler
    return masks


def _within(ids: Tensor, run: range) -> Tensor:
    return (ids >= run.start) & (ids < run.stop)


def nll_by_class(net: Net, tokens: int, facts: int, seeds: range) -> dict[str, float]:
    """Token-mean NLL in nats of contexts with `facts` facts: `all`, and per class."""
    losses: dict[str, list[Tensor]] = {}
    for seed in seeds:
        session = make_session(np.random.default_rng(seed), tokens, 0, facts)
        ids = torch.from_numpy(session.context_ids)
        nll = context_nll(net, ids)
        losses.setdefault("all", []).append(nll)
        for name, mask in class_masks(ids).items():
            losses.setdefault(name, []).append(nll[mask])
    return {name: torch.cat(parts).mean().item() for name, parts in losses.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--len", default="4k", help="context lengths")
    parser.add_argument("--facts", default="8,64,128,256", help="facts per context")
    parser.add_argument("--contexts", type=int, default=2)
    parser.add_argument("--seed", type=int, default=900)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    net = load_net(options.model)
    seeds = range(options.seed, options.seed + options.contexts)
    for length in options.len.split(","):
        for facts in map(int, options.facts.split(",")):
            nll = nll_by_class(net, parse_size(length, "--len"), facts, seeds)
            rounded = {name: round(value, 3) for name, value in nll.items()}
            say(len=length, facts=facts, **rounded)


if __name__ == "__main__":
    main()
