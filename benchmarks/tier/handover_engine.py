"""One server of a handover: requests one after the other, each settled before the next.

python -m benchmarks.tier.handover_engine PLAN.json JOB.json ANSWERS.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from kvtier.bench.engine import ChatEngine, SglangEngine
from kvtier.bench.measure import settled, warm_up
from kvtier.bench.schema import Plan
from kvtier.bench.worker import die_with_parent
from kvtier.synthetic.recall_script import RecallScript


class Request(BaseModel):
    """A prompt, and how many tokens it is answered with."""

    model_config = ConfigDict(frozen=True)

    input_ids: tuple[int, ...]
    new_tokens: int


class Answer(BaseModel):
    """cached_tokens: from the device or the tier. kv_bytes: on the device, once the turn has ended
    and nothing is on its way; stored_bytes: that the server has put into the tier so far."""

    model_config = ConfigDict(frozen=True)

    output_ids: tuple[int, ...]
    cached_tokens: int
    ttft_ms: float
    kv_bytes: int
    stored_bytes: int


def serve(engine: ChatEngine, requests: Sequence[Request]) -> list[Answer]:
    """Every request, in order."""
    script = RecallScript()
    warm_up(engine, script.warm_up_ids, script.stop_ids)
    engine.flush()
    empty = settled(engine).kv_used_bytes
    answers = []
    for request in requests:
        got = engine.generate(request.input_ids, request.new_tokens, ())
        after = settled(engine)
        answers.append(
            Answer(
                output_ids=got.output_ids,
                cached_tokens=got.cached_tokens,
                ttft_ms=got.ttft_ms,
                kv_bytes=after.kv_used_bytes - empty,
                stored_bytes=0 if after.tier is None else after.tier.stored_bytes,
            )
        )
    return answers


def main(argv: Sequence[str]) -> int:
    """The worker: plan and requests in, answers out."""
    die_with_parent()
    engine = SglangEngine(Plan.model_validate_json(Path(argv[0]).read_text()))
    try:
        requests = [Request.model_validate(one) for one in json.loads(Path(argv[1]).read_text())]
        answers = serve(engine, requests)
    finally:
        engine.close()
    Path(argv[2]).write_text(json.dumps([answer.model_dump() for answer in answers]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
