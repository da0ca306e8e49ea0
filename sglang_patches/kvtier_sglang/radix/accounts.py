"""How many slots of each head class a tree's nodes hold, and whether that is what it believes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import torch

from kvtier_sglang.radix.node import KvNode


@dataclass
class HeldSlots:
    """Slots of unlocked (evictable) and of locked (protected) nodes."""

    evictable: int = 0
    protected: int = 0
    locality_evictable: int = 0
    locality_protected: int = 0


def held_slots(nodes: Iterable[KvNode]) -> HeldSlots:
    """Counted from what the nodes say of themselves."""
    held = HeldSlots()
    for node in nodes:
        if node.lock_ref == 0:
            held.evictable += node.ca_size
            held.locality_evictable += node.locality_size
        else:
            held.protected += node.ca_size
            held.locality_protected += node.locality_size
    return held


def differences(counted: HeldSlots, kept: HeldSlots) -> Iterator[str]:
    """Where a tree's accounts are not what its nodes hold."""
    for field in fields(HeldSlots):
        held, believed = getattr(counted, field.name), getattr(kept, field.name)
        if held != believed:
            name = field.name.replace("_", " ")
            yield f"{name} size is {believed}, the nodes hold {held}"


def count_locality(node: KvNode, locality_of: torch.Tensor) -> int:
    """Locality slots that a node's tokens have. locality_of: see HeadSplitAllocator."""
    return int((locality_of[node.value] > 0).sum())


def wrong_nodes(nodes: Iterable[KvNode], locality_of: torch.Tensor) -> Iterator[str]:
    """Violations of what a node says of itself."""
    for node in nodes:
        if node.locality_size != count_locality(node, locality_of):
            yield f"node {node.id} miscounts its locality slots"
        if node.start != (0 if node.parent.parent is None else node.parent.stop):
            yield f"node {node.id} does not continue its parent"
        if len(node.value) != len(node.key):
            yield f"node {node.id} has {len(node.value)} slots"
        if node.ca_size != int(torch.count_nonzero(node.value)):
            yield f"node {node.id} miscounts its CA slots"


__all__ = ["HeldSlots", "count_locality", "differences", "held_slots", "wrong_nodes"]
