"""The sessions of a workload: what is asked when, decided before any engine starts.

main line:   context Q1 A1 | Q2 A2 | Q3 A3 …      A: the tokens the model really produced
branches:             └ Q1' A1'  └ Q2' A2'        more questions on the same prefix, for recall
"""

from __future__ import annotations

import numpy as np

from kvtier.bench.schema import ScriptName, Workload
from kvtier.synthetic.recall_script import RecallScript
from kvtier.synthetic.script import Script, ScriptedSession
from kvtier.synthetic.text import TextScript
from kvtier.synthetic.tokenizer import Tokenizer


def open_script(name: ScriptName, model_path: str) -> Script:
    """The language of a workload. Raises UsageError for a model that cannot be spoken to in it."""
    return RecallScript() if name == "recall" else TextScript(Tokenizer(model_path))


def turn_tokens(workload: Workload) -> int:
    """Tokens all turns of one session add to the cache, branches included."""
    return workload.turns * workload.questions * workload.exchange_tokens


def longest_prompt(workload: Workload) -> int:
    """Positions the longest request of a session reaches, answer included."""
    branch = workload.exchange_tokens if workload.questions > 1 else 0
    return workload.context_tokens + workload.turns * workload.exchange_tokens + branch


def plan_sessions(workload: Workload, script: Script) -> list[ScriptedSession]:
    """The sessions of a workload. Session i depends on the seed and i only."""
    return [
        script.session(
            np.random.default_rng([workload.seed, index]),
            workload.context_tokens,
            workload.turns,
            workload.questions,
        )
        for index in range(workload.sessions)
    ]
