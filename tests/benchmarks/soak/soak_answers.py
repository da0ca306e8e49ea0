"""The answers of engines in the tests of the soak, and the rule of their locality heads."""

from __future__ import annotations

import pytest

pytest.importorskip("aiohttp")

from benchmarks.soak.client import Said
from benchmarks.soak.models import FIRST
from kvtier.retention.locality import LocalityRule
from kvtier.synthetic.recall import DEFAULT_LANGUAGE

EOT = DEFAULT_LANGUAGE.eot
RULE = LocalityRule(sink_tokens=128, recent_tokens=256, branch_recent_tokens=128)


def said(**changes) -> Said:
    right = {
        "tokens": (7, 8, EOT), "logprobs": (-0.1, -0.2, -0.3), "prompt_logprobs": (), "cached": 0,
        "restored": 0, "retracted": 0, "version": FIRST,
    }  # fmt: skip
    return Said(**right | changes)
