"""Draw kept-entries.png: what a model's KV heads hold of a context before its turn ends, and after.

    python docs/kept_entries.py --model-path out/smollm2 --scorer-file out/smollm2/token_worth.npz

The context is synthetic text with questions, held out of calibration. The KV is the model's own,
and entries are chosen by what a server chooses them by.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from kvtier.config.sections import LocalitySettings
from kvtier.heads.model.config import model_name, shape_of
from kvtier.heads.model.loading import load_model
from kvtier.heads.profile import full_profile
from kvtier.heads.reference.rotation import rotation_of
from kvtier.heads.reference.session import ReferenceSession
from kvtier.heads.samples.synthetic import HELD_OUT, make_samples, tasks_for
from kvtier.retention.head_budgets import adaptive_selection
from kvtier.retention.locality import LocalityRule
from kvtier.retention.token_worth import TokenWorth

RULE = LocalityRule(**LocalitySettings.COMPETING, compensation=False)
COLUMN = 16  # tokens that a column of the picture stands for


def kept_entries(model_path: str, scorer_file: Path, tokens: int, share: float) -> Tensor:
    """Return the entries that heads keep of a finished turn, bool `[layers * kv_heads, tokens]`."""
    model, tasks = load_model(model_path), tasks_for(model_path)
    [sample] = make_samples(tasks.make, tasks.measuring, 1, [tokens], 0, HELD_OUT)
    shape, tokens = shape_of(model), len(sample.context_ids)
    session = ReferenceSession(model, full_profile(shape), RULE)
    session.turn(sample.context_ids, 0)
    fitted, layers = TokenWorth.load(scorer_file), []
    for layer in range(shape.num_layers):
        rotation = rotation_of(model, layer, torch.arange(tokens))
        layers.append(fitted.predict(layer, *session.exact_kv(layer), rotation))
    span = RULE.dropped(0, tokens, tokens)
    kept = torch.ones(len(layers) * shape.num_kv_heads, tokens, dtype=torch.bool)
    worth = torch.cat(layers)[:, span.begin : span.end]
    kept[:, span.begin : span.end] = adaptive_selection(worth, round(share * span.num_tokens))
    return kept


def draw(kept: Tensor, model: str, path: Path) -> None:
    heads, tokens = kept.shape
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    whole = tokens // COLUMN * COLUMN
    columns = kept[:, :whole].float().unflatten(1, (-1, COLUMN)).mean(-1)
    before, after = figure.subplots(1, 2, sharey=True)
    for axes, shown, when in (
        (before, torch.ones_like(columns), "while a turn runs"),
        (after, columns, "when it has ended"),
    ):
        image = axes.imshow(
            shown, aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest",
            extent=(0, whole, heads, 0),
        )  # fmt: skip
        entries = heads * tokens if shown is not columns else int(kept.sum())
        axes.set_title(f"{when}: {entries:,} entries", fontsize=10, loc="left")
        axes.set_xlabel("token of the context")
    before.set_ylabel("KV head, first layer above")
    figure.colorbar(image, ax=[before, after], label="share kept")
    figure.suptitle(f"{model}, {tokens:,} tokens, {heads} KV heads", fontsize=10)
    figure.savefig(path, format="png", dpi=120, metadata={"Software": "kvtier"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--scorer-file", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--retention", type=float, default=0.25)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "kept-entries.png")
    options = parser.parse_args()
    kept = kept_entries(options.model_path, options.scorer_file, options.tokens, options.retention)
    draw(kept, model_name(options.model_path), options.out)


if __name__ == "__main__":
    main()
