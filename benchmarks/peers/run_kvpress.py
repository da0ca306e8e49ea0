"""NVIDIA kvpress over given contexts: recall and kept bytes per press, share and seed.

    python run_kvpress.py CONTEXTS.json RECORDS.json --model DIR [--shares 0.75,0.5,0.25,0.1]

Runs in an environment of its own (requirements.txt) and imports nothing of kvtier.

A context is prefilled once, exactly, as kvpress does it: its hooks see every layer's hidden states,
keys and values, and a press returns what the layer keeps. Here one recording press keeps
everything, and every other press compresses what it recorded; `check` proves on the first context
that this is what `with press(model)` leaves in the cache. Questions follow at the positions after
the whole context, as in kvpress's own pipeline, each from the same compressed cache, greedily.

    positions   0 … n-1 context (some of it dropped) | n … n+t-1 question | n+t … answer
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

NAME_TOKENS = 2
ANSWER_SLACK_TOKENS = 1  # the end of the turn
CHECKED_ANSWERS = 4
PACKAGES = ("kvpress", "transformers", "torch", "numpy")

Json = dict[str, Any]


def score_answer(expected: Sequence[int], got: Sequence[int], eot_id: int) -> float:
    """Share of codes right, each at its place, as kvtier's bench scores it.

    expected: name and codes; got: what the model wrote, up to `eot_id`.
    """
    got = list(got)
    got = got[: got.index(eot_id)] if eot_id in got else got
    wanted = list(expected)[NAME_TOKENS:]
    hits = sum(want == have for want, have in zip(wanted, got[NAME_TOKENS:], strict=False))
    return hits / len(wanted)


def kept_tokens(share: float, context_tokens: int) -> int:
    """Tokens every head keeps; a share is never undercut by rounding."""
    return math.ceil(share * context_tokens - 1e-9)


def compression_ratio(kept: int, context_tokens: int) -> float:
    """The ratio at which kvpress's `int(n * (1 - ratio))` is exactly `kept`."""
    return 0.0 if kept == context_tokens else 1 - (kept + 0.5) / context_tokens


@dataclass(frozen=True)
class Method:
    """A press class of kvpress. Presses that draw random numbers are repeated over seeds.

    scorer: class of the press that says what stays, for a press that wraps one.
    """

    name: str
    press: str
    is_random: bool = False
    scorer: str | None = None


METHODS = (
    Method("kvpress Compactor", "CompactorPress", is_random=True),
    Method("kvpress SnapKV", "SnapKVPress"),
    Method("kvpress KeyDiff", "KeyDiffPress"),
    Method("kvpress StreamingLLM", "StreamingLLMPress"),
    Method("kvpress random", "RandomPress", is_random=True),
    Method("kvpress Compactor, merging", "MergingPress", is_random=True, scorer="CompactorPress"),
    Method("kvpress KeyDiff, merging", "MergingPress", scorer="KeyDiffPress"),
)
FULL = "full cache"


@dataclass
class Recorded:
    """The arguments that kvpress's hook hands to a press, per layer."""

    layers: list[tuple[Any, ...]] = field(default_factory=list)


def make_press(method: Method, ratio: float) -> Any:
    """A press of `method` with kvpress's own defaults."""
    import kvpress

    if method.scorer is None:
        return getattr(kvpress, method.press)(compression_ratio=ratio)
    scorer = getattr(kvpress, method.scorer)(compression_ratio=ratio)
    return getattr(kvpress, method.press)(press=scorer)


def recording_press(recorded: Recorded) -> Any:
    """A press that keeps everything and remembers what it was given."""
    import kvpress

    def keep(*layer: Any) -> tuple[Any, Any]:
        recorded.layers.append(layer)
        keys, values = layer[2], layer[3]
        return keys, values

    press = kvpress.BasePress()
    press.compress = keep
    return press


def prefill(model: Any, context_ids: Any, press: Any | None) -> Any:
    """The cache after `context_ids` `[1, tokens]`, compressed by `press`."""
    from transformers import DynamicCache

    cache = DynamicCache()
    with press(model) if press is not None else contextlib.nullcontext():
        model.model(input_ids=context_ids, past_key_values=cache, use_cache=True)
    return cache


def compress(recorded: Recorded, press: Any) -> list[tuple[Any, Any]]:
    """Keys and values `[1, kv_heads, kept, dim]` that `press` leaves, per layer."""
    return [press.compress(*layer) for layer in recorded.layers]


def cache_of(layers: list[tuple[Any, Any]], batch: int) -> Any:
    """A fresh cache with `batch` copies of the layers' keys and values."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys.expand(batch, -1, -1, -1), values.expand(batch, -1, -1, -1), index)
    return cache


def num_bytes(layers: list[tuple[Any, Any]]) -> int:
    """Bytes of the kept keys and values of one context."""
    return sum(x.numel() * x.element_size() for pair in layers for x in pair)


def answer(model: Any, layers: list[tuple[Any, Any]], prompts: Any, start: int, new: int) -> Any:
    """Greedy answers `[questions, new]` to prompts `[questions, tokens]` from position `start`."""
    import torch

    cache = cache_of(layers, len(prompts))
    ids, answers = prompts, []
    for _ in range(new):
        positions = torch.arange(start, start + ids.shape[1]).expand(ids.shape)
        output = model(
            ids, past_key_values=cache, position_ids=positions, use_cache=True, logits_to_keep=1
        )
        start += ids.shape[1]
        ids = output.logits[:, -1].argmax(-1, keepdim=True)
        answers.append(ids)
    return torch.cat(answers, dim=1)


class Asker:
    """A prefilled context and its questions."""

    def __init__(self, model: Any, context: Json, eot_id: int) -> None:
        import torch

        self.model, self.context, self.eot_id = model, context, eot_id
        self.context_ids = torch.tensor([context["context_ids"]])
        # Equal lengths, so that one batch asks them all and nothing is padded.
        self.prompts = torch.tensor([q["prompt_ids"] for q in context["questions"]])
        self.expected = [q["answer_ids"] for q in context["questions"]]
        self.recorded = Recorded()
        prefill(model, self.context_ids, recording_press(self.recorded))

    @property
    def num_tokens(self) -> int:
        return int(self.context_ids.shape[1])

    def answers(self, layers: list[tuple[Any, Any]]) -> Any:
        new = len(self.expected[0]) + ANSWER_SLACK_TOKENS
        return answer(self.model, layers, self.prompts, self.num_tokens, new)

    def record(self, method: str, share: float, seed: int, press: Any) -> Json:
        """Ask every question after `press` and score the answers."""
        import torch

        torch.manual_seed(seed)
        layers = compress(self.recorded, press)
        answers = self.answers(layers).tolist()
        pairs = zip(self.expected, answers, strict=True)
        return {
            "method": method,
            "kind": self.context["kind"],
            "context": self.context["index"],
            "kept_share": share,
            "seed": seed,
            "recalls": [score_answer(want, got, self.eot_id) for want, got in pairs],
            "kv_bytes": num_bytes(layers),
        }


def check(asker: Asker, shares: Sequence[float], methods: Sequence[Method]) -> list[str]:
    """Prove the shortcuts on one context. Raises AssertionError; returns what was proved."""
    import torch

    full = [(layer[2], layer[3]) for layer in asker.recorded.layers]
    answers = asker.answers(full)
    whole = torch.cat([asker.context_ids.expand(len(answers), -1), asker.prompts, answers], dim=1)
    first = asker.num_tokens + asker.prompts.shape[1] - 1
    for row, said in zip(whole[:CHECKED_ANSWERS], answers[:CHECKED_ANSWERS], strict=True):
        logits = asker.model(row[None], use_cache=False).logits[0, first:-1]
        assert torch.equal(logits.argmax(-1), said), "the cache answers unlike the model without it"
    for method in methods:
        untouched = compress(asker.recorded, make_press(method, 0.0))
        assert torch.equal(asker.answers(untouched), answers), f"{method.name} at ratio 0 differs"
        assert_same_as_kvpress(asker, method, min(shares))
    return [
        "answers from the uncompressed cache equal the model's without a cache",
        "every press at compression ratio 0 answers as no press does",
        "every press leaves the keys and values that `with press(model)` leaves",
    ]


def assert_same_as_kvpress(asker: Asker, method: Method, share: float) -> None:
    """`compress` on the recorded layers against kvpress's own hooks, bit by bit."""
    import torch

    kept = kept_tokens(share, asker.num_tokens)
    press = make_press(method, compression_ratio(kept, asker.num_tokens))
    torch.manual_seed(0)
    mine = compress(asker.recorded, press)
    torch.manual_seed(0)
    theirs = prefill(asker.model, asker.context_ids, press)
    for (keys, values), layer in zip(mine, theirs.layers, strict=True):
        assert keys.shape[2] == kept, f"{method.name} keeps {keys.shape[2]} tokens, not {kept}"
        assert torch.equal(keys, layer.keys), f"{method.name}: other keys than kvpress keeps"
        assert torch.equal(values, layer.values), f"{method.name}: other values"


def run(
    asker: Asker, shares: Sequence[float], seeds: int, methods: Sequence[Method]
) -> Iterator[Json]:
    """Every method at every share, and the full cache."""
    yield asker.record(FULL, 1.0, 0, make_press(methods[0], 0.0))
    for method in methods:
        for share in shares:
            kept = kept_tokens(share, asker.num_tokens)
            press = make_press(method, compression_ratio(kept, asker.num_tokens))
            for seed in range(seeds if method.is_random else 1):
                yield asker.record(method.name, share, seed, press)


def load_model(path: Path) -> Any:
    """The model in float32 with PyTorch's own attention, on one thread."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


def environment() -> Json:
    """Versions of what decides the numbers."""
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def main(argv: Sequence[str] | None = None, say: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contexts", type=Path)
    parser.add_argument("records", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--shares", default="0.75,0.5,0.25,0.1", help="shares kept")
    parser.add_argument("--seeds", type=int, default=3, help="draws of the random presses")
    parser.add_argument("--methods", nargs="+", choices=[m.name for m in METHODS], help="(all)")
    options = parser.parse_args(argv)
    methods = [m for m in METHODS if options.methods is None or m.name in options.methods]
    shares = [float(text) for text in options.shares.split(",")]
    document = json.loads(options.contexts.read_text())
    model, started = load_model(options.model), time.perf_counter()
    records: list[Json] = []
    checks: list[str] = []
    for number, context in enumerate(document["contexts"]):
        asker = Asker(model, context, document["eot_id"])
        checks = checks or check(asker, shares, methods)
        records += run(asker, shares, options.seeds, methods)
        say(f"context {number + 1} of {len(document['contexts'])} ({context['kind']})")
    result = {
        "environment": environment(),
        "checks": checks,
        "seconds": round(time.perf_counter() - started, 1),
        "records": records,
    }
    options.records.write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
