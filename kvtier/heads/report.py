"""A calibration of heads for people: lines on the terminal, and a picture of the profile."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.heads.profile import HeadProfile
from kvtier.sizes import format_size

if TYPE_CHECKING:
    from kvtier.heads.calibrate import Calibrated


def summary(result: Calibrated) -> list[str]:
    """Return a few lines for people on what was found."""
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
        lines.append(
            f"  of their tokens: {found.profile.tokens:.1%}   full {found.full.tokens:.1%}   "
            f"random heads {found.random.tokens:.1%}   no heads {found.window.tokens:.1%}"
        )
        lines.append(
            f"  of what the context is worth, {_percent(found.worth)} is kept"
            + "".join(f"   {task} {_percent(one.worth)}" for task, one in found.tasks.items())
        )
        budget = profile.parameters.get("budget")
        if budget is not None and 1 - found.worth > budget:
            lines.append(
                f"  over the budget of {budget:.1%} on samples it was not chosen on: "
                "calibrate with more --samples"
            )
    return lines


def _percent(worth: float) -> str:
    """A dash where the context is worth nothing, so that no share of that can be kept."""
    return "-" if math.isnan(worth) else f"{worth:.1%}"


MAX_INCHES = 16.0


def draw_profile(profile: HeadProfile, path: Path) -> None:
    """Write the picture as PNG; needs matplotlib, no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers, heads = profile.shape.num_layers, profile.shape.num_kv_heads
    size = (min(MAX_INCHES, 3.6 + 0.42 * heads), min(MAX_INCHES, 2.0 + 0.34 * layers))
    figure = Figure(figsize=(max(6.4, size[0]), size[1]), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(score_grid(profile), aspect="auto", cmap="viridis", origin="upper")
    anchored = [(layer, head) for layer, row in enumerate(profile.ca_heads) for head in row]
    axes.scatter(
        [head for _, head in anchored], [layer for layer, _ in anchored],
        s=42, facecolor="white", edgecolor="black", linewidth=0.8, label="CA head",
    )  # fmt: skip
    axes.set_xlabel("KV head")
    axes.set_ylabel("layer")
    axes.set_xticks(range(0, heads, max(1, heads // 16)))
    axes.set_yticks(range(0, layers, max(1, layers // 16)))
    axes.set_title("\n".join(title_lines(profile)), fontsize=9, loc="left")
    label = "score (higher = keep the context)" if profile.scores else "CA head"
    figure.colorbar(image, ax=axes, label=label)
    # No date and no library version: equal profiles give equal files.
    figure.savefig(path, format="png", dpi=120, metadata={"Software": "kvtier"})


def score_grid(profile: HeadProfile) -> list[list[float]]:
    """[layers][kv_heads] scores; without scores, 1 for CA heads and 0 for the others."""
    if profile.scores is not None:
        return [list(row) for row in profile.scores]
    heads = range(profile.shape.num_kv_heads)
    return [[float(head in row) for head in heads] for row in profile.ca_heads]


def title_lines(profile: HeadProfile) -> list[str]:
    """Model, method and share, then one line per measured recall."""
    total = profile.shape.num_layers * profile.shape.num_kv_heads
    lines = [
        f"{profile.model}: {profile.method}, "
        f"{profile.num_ca_heads} of {total} KV heads keep the context ({profile.ca_share:.0%})"
    ]
    for cost in profile.costs:
        if cost.metric == "recall":
            lines.append(
                f"recall at {format_size(cost.context_tokens)}: "
                f"{cost.profile:.1%}, full retention {cost.full:.1%} ({cost.samples} answers)"
            )
    return lines
