"""What a calibration says on the terminal while it runs and when it is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.sizes import format_size

if TYPE_CHECKING:
    from kvtier.heads.calibrate import Calibrated


def summary(result: Calibrated) -> list[str]:
    """What was found, in a few lines for people."""
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
        budget = profile.parameters.get("budget")
        if budget is not None and found.full.recall - found.profile.recall > budget:
            lines.append(
                f"  over the budget of {budget:.1%} on samples it was not chosen on: "
                "calibrate with more --samples"
            )
    return lines
