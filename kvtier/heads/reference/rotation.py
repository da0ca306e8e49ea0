"""The rotation of each layer's keys, found by trying and proven.

At every position of one repeated token a layer sees the same hidden state: its values are all
alike, so attention returns them, whatever it weighs. The keys before rotation are then alike, too:
a rotation that is undone rightly shows it, and one that is undone wrongly does not.

    one token, repeated ── model ── rotated keys ──┬─ not rotated at all?  alike? ──┐
                                                   ├─ pairs are halves?    alike? ──┼─ the one
                                                   └─ pairs are neighbours? alike? ─┘  that fits
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvtier.errors import UnsupportedModelError
from kvtier.heads.model.support import FULL, windows_of
from kvtier.heads.reference.attention import attending
from kvtier_kernels.scores import Rotation, turn, unrotate

# Positions that the repeated token stands at: enough for fast and slow pairs to turn.
PROVING_TOKENS, STRIDE = 48, 7
PROVING_TOKEN = 5
# The share of a key's norm by which keys that should be alike may differ in bfloat16. Rotations
# that do not fit leave 0.3 and more.
TOLERANCE = 0.05

# Kinds of rotary embedding by whose angles a longer context turns all of its keys anew.
LENGTH_DEPENDENT = ("dynamic", "longrope")

Tables = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Positions, int64 `[tokens]` -> cos, sin `[tokens, rotary_dim / 2]`, as they are applied."""


@dataclass(frozen=True)
class KeyRotation:
    """One way to rotate keys. interleaved: pairs are neighbours, not halves; see `unrotate`."""

    tables: Tables
    interleaved: bool

    def at(self, positions: Tensor) -> Rotation:
        """Return the rotation of keys at these positions, int64 `[tokens]`."""
        return Rotation(*self.tables(positions), interleaved=self.interleaved)

    def shifted(self, by: int) -> KeyRotation:
        """Return the rotation of a model that rotates every key as if it were so much further
        on."""
        return replace(self, tables=lambda positions: self.tables(positions + by))


def proving_positions(longest: int, device: Any = None) -> Tensor:
    """Return the positions of the repeated token, int64 `[tokens]`; longest: position that the
    model reads, 0 for any."""
    positions = torch.arange(PROVING_TOKENS, device=device) * STRIDE
    return positions if not longest else positions[positions < longest]


def fitting(
    keys: Tensor, positions: Tensor, candidates: Iterable[KeyRotation | None]
) -> tuple[KeyRotation | None, float]:
    """The candidate by which a repeated token's keys `[heads, tokens, dim]` are most alike, and by
    how much they still differ: the largest distance from their mean, as a share of its norm.

    A candidate of None leaves keys as they are. One for other dimensions is passed over.
    """
    best: tuple[KeyRotation | None, float] = (None, float("inf"))
    for candidate in candidates:
        plain = keys.float()
        if candidate is not None:
            cos, sin, interleaved = candidate.at(positions)
            if 2 * cos.shape[-1] > keys.shape[-1]:
                continue
            plain = unrotate(keys, cos, sin, interleaved=interleaved)
        mean = plain.mean(1, keepdim=True)
        norm = mean.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        differ = float(((plain - mean).norm(dim=-1) / norm).max())
        if differ < best[1]:
            best = (candidate, differ)
    return best


def prove(
    keys: Sequence[Tensor], positions: Tensor, candidates: Sequence[KeyRotation | None]
) -> list[KeyRotation | None]:
    """Each layer's rotation; None where keys are not rotated.

    keys: per layer, a repeated token's at these positions, `[heads, tokens, dim]`.
    Raises UnsupportedModelError where none of the candidates fits.
    """
    found = []
    for layer, of_layer in enumerate(keys):
        rotation, differ = fitting(of_layer, positions, candidates)
        if not differ <= TOLERANCE:
            raise UnsupportedModelError(
                "--model-path",
                "keys whose rotation kvtier can undo",
                f"layer {layer}, whose keys of one repeated token differ by {differ:.2f} of their "
                "norm by every rotation that was tried",
            )
        found.append(rotation)
    return found


def candidates_of(rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> list[KeyRotation]:
    """Ways to apply what a rotary module of transformers returns, which tells neither how often it
    repeats its angles nor which dimensions are pairs.

    rotary: (anything of the wanted dtype and device, positions `[1, tokens]`) -> cos, sin
            `[1, tokens, n]`
    """

    def tables(pick: Callable[[Tensor], Tensor]) -> Tables:
        def at(positions: Tensor) -> tuple[Tensor, Tensor]:
            like = torch.empty(0, dtype=torch.float32, device=positions.device)
            cos, sin = rotary(like, positions[None])
            return pick(cos[0]), pick(sin[0])

        return at

    halved, every_other = tables(lambda x: x.chunk(2, -1)[0]), tables(lambda x: x[..., ::2])
    whole = tables(lambda x: x)
    return [
        KeyRotation(halved, interleaved=False),
        KeyRotation(halved, interleaved=True),
        KeyRotation(every_other, interleaved=True),
        KeyRotation(whole, interleaved=False),
        KeyRotation(whole, interleaved=True),
    ]


_found: WeakKeyDictionary[Any, list[KeyRotation | None]] = WeakKeyDictionary()


def rotations_of(model: Any) -> list[KeyRotation | None]:
    """Return the rotation of each layer of a transformers model, None for one with a window; looked
    for once per model.

    Raises UnsupportedModelError where none that is known fits.
    """
    if model not in _found:
        _found[model] = _find(model)
    return _found[model]


def rotation_of(model: Any, layer: int, positions: Tensor) -> Rotation | None:
    """Return the rotation of a layer's keys at these positions, int64 `[tokens]`; None: not rotated
    at all.

    Raises UnsupportedModelError; see `rotations_of`.
    """
    rotation = rotations_of(model)[layer]
    return None if rotation is None else rotation.at(positions)


def turned_keys(model: Any, layer: int, keys: Tensor, shift: int) -> Tensor:
    """A layer's rotated keys `[heads, tokens, dim]` as they would be so many positions further on,
    rounded as they are."""
    rotation = rotation_of(model, layer, torch.tensor([abs(shift)], device=keys.device))
    return keys if rotation is None or not shift else turn(keys, rotation, back=shift < 0)


@torch.inference_mode()
def _find(model: Any) -> list[KeyRotation | None]:
    config = model.config.get_text_config().to_dict()
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    # The rotation is that of layers that attend to everything, where it differs.
    rope = rope.get(FULL) or rope
    if rope.get("rope_type") in LENGTH_DEPENDENT:
        expected = "keys whose rotation does not depend on the context's length"
        raise UnsupportedModelError("--model-path", expected, rope["rope_type"])
    positions = proving_positions(int(config.get("max_position_embeddings") or 0), model.device)
    keys: dict[int, Tensor] = {}

    def attend_layer(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        keys[layer] = k[0]
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    ids = torch.full((1, len(positions)), PROVING_TOKEN, device=model.device)
    with attending(model, attend_layer, varied=True):
        model(ids, position_ids=positions[None], use_cache=False, logits_to_keep=1)
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    if rotary is not None and FULL in getattr(rotary, "layer_types", ()):
        rotary = partial(rotary, layer_type=FULL)
    if rotary is not None and "mrope_section" in rope:
        rotary = partial(_of_text, rotary)
    rotated = [] if rotary is None else candidates_of(rotary)
    windows = windows_of(config) or (None,) * len(keys)
    full = [layer for layer in sorted(keys) if windows[layer] is None]
    found: list[KeyRotation | None] = [None] * len(keys)
    proven = prove([keys[layer] for layer in full], positions, [None, *rotated])
    for layer, rotation in zip(full, proven, strict=True):
        found[layer] = rotation
    return found


def _of_text(
    rotary: Callable[..., tuple[Tensor, Tensor]], like: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what a rotary module applies to text, if it takes a picture's places, too."""
    cos, sin = rotary(like, positions.expand(3, *positions.shape))
    return (cos[0], sin[0]) if cos.ndim == 4 else (cos, sin)
