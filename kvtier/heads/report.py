"""The report of a calibration of heads on the terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

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
