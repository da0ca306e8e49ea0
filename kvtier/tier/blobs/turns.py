"""The record of how a context's turns were compressed: what it takes to compress restored exact KV
the same way.

A record is stored when a turn ends, under the name of the last whole span before the turn's end
(keys.SpanChain.turns_key). Contexts that differ only behind that span share the name; the newest
one has it, and `tail` tells whose it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvtier.errors import TierProtocolError
from kvtier.tier.blobs.payload import record_layout

SCHEMA = "kvtier/turns/1"
LAYOUT = record_layout(SCHEMA)
MAX_BYTES = 1 << 20
# Nodes of a record. Writing and locking them takes the scheduler time that grows with their square.
MAX_NODES = 1024
# Positions beyond it are nonsense, and larger numbers do not fit what is computed with them.
MAX_POSITION = (1 << 31) - 1


class NodeRecord(BaseModel):
    """One node of the radix tree, from where the one before it ends.

    stop, prompt_stop: positions in the context; see kvtier_sglang.radix.node.KvNode.
    compressed:        its turn had ended.
    dropped:           offsets [begin, end) of the span that locality heads dropped.
    kept:              entries of that span that CA heads kept; all of them unless compacted.
    exact:             computed with nothing before it dropped.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    stop: int = Field(ge=1, le=MAX_POSITION)
    prompt_stop: int = Field(ge=0, le=MAX_POSITION)
    compressed: bool
    dropped: tuple[int, int]
    kept: int = Field(ge=0)
    exact: bool


class TurnRecord(BaseModel):
    """Every node of a context, first to last.

    start: where the first begins: behind the prefix that a memory stands for, or at 0.
    tail:  digest of the tokens behind the last whole span.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    nodes: tuple[NodeRecord, ...] = Field(min_length=1, max_length=MAX_NODES)
    tail: str
    start: int = Field(default=0, ge=0, le=MAX_POSITION)

    @model_validator(mode="after")
    def _nodes_follow_each_other(self) -> TurnRecord:
        # KV that is computed behind a memory is never exact.
        start, exact = self.start, self.start == 0
        for node in self.nodes:
            begin, end = node.dropped
            if node.stop <= start:
                raise ValueError("nodes that do not follow each other")
            if not 0 <= begin <= end <= node.stop - start:
                raise ValueError("a dropped span outside of its node")
            if not min(1, end - begin) <= node.kept <= end - begin:
                raise ValueError("more kept than there was, or nothing")
            if node.exact and not exact:
                raise ValueError("exact KV behind KV that is not")
            start, exact = node.stop, node.exact
        return self

    @property
    def stop(self) -> int:
        """Tokens of the context."""
        return self.nodes[-1].stop

    @property
    def exact_stop(self) -> int:
        """The number of leading tokens that were computed with nothing before them dropped."""
        return max((node.stop for node in self.nodes if node.exact), default=0)

    def encode(self) -> bytes:
        return self.model_dump_json(exclude_defaults=True).encode()


@dataclass(frozen=True)
class Place:
    """A node of a record with where it begins."""

    start: int
    node: NodeRecord


def places(record: TurnRecord) -> list[Place]:
    starts = [record.start, *(node.stop for node in record.nodes)]
    return [Place(start, node) for start, node in zip(starts, record.nodes, strict=False)]


def decode_record(payload: bytes | bytearray | memoryview) -> TurnRecord:
    """Raises TierProtocolError for anything that is no record."""
    try:
        return TurnRecord.model_validate_json(bytes(payload), strict=True)
    except ValidationError as error:
        # Any number of things may be wrong with it, each with a text of its own.
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise TierProtocolError(
            f"a record of turns that makes no sense: {where}: {first['msg']}"
        ) from error


def tail_digest(tail_ids: Sequence[int]) -> str:
    """The digest of the tokens behind the last whole span."""
    return hashlib.sha256(np.asarray(tail_ids, dtype="<i8").tobytes()).hexdigest()[:32]
