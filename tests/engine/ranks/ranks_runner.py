"""engine_runner.py with something wrong on the last rank: `ranks_runner.py plan.json out.json`.

plan: as there, and {"fault"}: see faulty_ranks.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import engine_runner  # noqa: E402
import faulty_ranks  # noqa: E402

if __name__ == "__main__":
    faulty_ranks.play(json.loads(Path(sys.argv[1]).read_text())["fault"])
    engine_runner.main(sys.argv[1], sys.argv[2])
