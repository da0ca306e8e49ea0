"""How a head profile's CA heads lie over tensor parallel ranks, and orders of the heads that lie
better.

SGLang gives each rank a run of KV heads of every layer. A rank with more CA heads needs more bytes
for a token, and all ranks have as many tokens as the poorest can pay for. A layer ends when the
last rank is done with it, so what counts for time is the most CA heads that any rank has there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvtier.errors import UsageError
from kvtier.heads.profile import Head, HeadProfile, ModelShape

Order = tuple[int, ...]
"""Of a layer: which KV head comes to each place."""


class Balance(NamedTuple):
    """heads: CA heads of each rank, over all layers; slowest: the CA heads of each layer's fullest
    rank, over all layers, divided by what they would be were every layer even."""

    heads: tuple[int, ...]
    slowest: float

    @property
    def listed(self) -> str:
        """The heads of each rank, for people."""
        return " + ".join(map(str, self.heads))


def check_ranks(shape: ModelShape, ranks: int) -> None:
    """Raise UsageError unless every rank has as many whole KV heads."""
    if ranks < 1 or shape.num_kv_heads % ranks:
        raise UsageError("--tp", f"a divisor of the model's {shape.num_kv_heads} KV heads", ranks)


def balance(profile: HeadProfile, ranks: int) -> Balance:
    """How the CA heads lie. Raises UsageError, see `check_ranks`."""
    check_ranks(profile.shape, ranks)
    held = [
        [len(layer) for layer in profile.of_rank(rank, ranks).ca_heads] for rank in range(ranks)
    ]
    fullest = sum(max(layer) for layer in zip(*held, strict=True))
    even = profile.num_ca_heads / ranks
    return Balance(tuple(map(sum, held)), fullest / even if even else 1.0)


def even_orders(profile: HeadProfile, ranks: int) -> list[Order]:
    """For each layer an order of its KV heads in which no rank has more CA heads than it must, and
    over all layers no rank has more than one above any other.

    Heads stay in their order within a rank, CA heads first. Raises UsageError, see `check_ranks`.
    """
    check_ranks(profile.shape, ranks)
    held = [0] * ranks
    places = profile.shape.num_kv_heads // ranks
    orders = []
    for layer, chosen in enumerate(profile.ca_heads):
        # Those with the fewest so far have one more, where they cannot all have as many.
        poorest_first = sorted(range(ranks), key=lambda rank: (held[rank], rank))
        shares = [len(chosen) // ranks] * ranks
        for rank in poorest_first[: len(chosen) % ranks]:
            shares[rank] += 1
        anchored, local = list(chosen), list(profile.locality_heads(layer))
        order: list[int] = []
        for rank, share in enumerate(shares):
            held[rank] += share
            order += anchored[:share] + local[: places - share]
            del anchored[:share], local[: places - share]
        orders.append(tuple(order))
    return orders


def balanced_heads(order: Sequence[Head], count: int, shape: ModelShape, ranks: int) -> list[Head]:
    """About `count` CA heads, the first of an order as far as ranks have equally many of them.

    order: every head, best first. With one KV head a rank whole layers are taken, those whose heads
    come first on average, and count is rounded to whole layers; otherwise a rank that has its part
    takes no more. Raises UsageError, see `check_ranks`.
    """
    check_ranks(shape, ranks)
    places = shape.num_kv_heads // ranks
    if places == 1:
        at = {head: place for place, head in enumerate(order)}
        layers = sorted(
            range(shape.num_layers),
            key=lambda layer: sum(at[layer, head] for head in range(shape.num_kv_heads)),
        )
        taken = layers[: max(1, round(count / ranks))]
        return [(layer, head) for layer in taken for head in range(shape.num_kv_heads)]
    # As many ranks have one more as do not come out even.
    extra, held = count % ranks, [0] * ranks
    heads: list[Head] = []
    for layer, head in order:
        rank = head // places
        if held[rank] < count // ranks:
            pass
        elif held[rank] == count // ranks and extra:
            extra -= 1
        else:
            continue
        held[rank] += 1
        heads.append((layer, head))
    return heads


def reordered(profile: HeadProfile, orders: Sequence[Order]) -> HeadProfile:
    """The same heads of a model whose heads were put into another order."""
    ca_heads = tuple(
        tuple(place for place, head in enumerate(order) if head in chosen)
        for order, chosen in zip(orders, profile.ca_heads, strict=True)
    )
    scores = profile.scores and tuple(
        tuple(row[head] for head in order)
        for order, row in zip(orders, profile.scores, strict=True)
    )
    return profile.model_copy(update={"ca_heads": ca_heads, "scores": scores, "revision": None})


__all__ = [
    "Balance",
    "Order",
    "balance",
    "balanced_heads",
    "check_ranks",
    "even_orders",
    "reordered",
]
