"""The slots that a tree's nodes hold, compared with what the tree believes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import torch

from kvtier_sglang.radix.node import KvNode


@dataclass
class HeldSlots:
    """The slots of unlocked (evictable) and of locked (protected) nodes."""

    evictable: int = 0
    protected: int = 0


def held_slots(nodes: Iterable[KvNode]) -> HeldSlots:
    """Count the slots that nodes hold, by what each says of itself."""
    held = HeldSlots()
    for node in nodes:
        if node.lock_ref == 0:
            held.evictable += node.num_slots
        else:
            held.protected += node.num_slots
    return held


def differences(counted: HeldSlots, kept: HeldSlots) -> Iterator[str]:
    """Yield the differences between a tree's accounts and what its nodes hold."""
    for field in fields(HeldSlots):
        held, believed = getattr(counted, field.name), getattr(kept, field.name)
        if held != believed:
            name = field.name.replace("_", " ")
            yield f"{name} size is {believed}, the nodes hold {held}"


def wrong_nodes(nodes: Iterable[KvNode]) -> Iterator[str]:
    """Yield the violations of what nodes say of themselves."""
    for node in nodes:
        if node.start != (0 if node.parent.parent is None else node.parent.stop):
            yield f"node {node.id} does not continue its parent"
        if len(node.value) != len(node.key):
            yield f"node {node.id} has {len(node.value)} slots"
        if node.num_slots != int(torch.count_nonzero(node.value)):
            yield f"node {node.id} miscounts its slots"


__all__ = ["HeldSlots", "differences", "held_slots", "wrong_nodes"]
