"""The worth of a token's entry in a KV head to later turns, told by the layer's KV.

    ln(attention drawn) ≈ w · [k, v, |k|, |v|  of all KV heads of the layer, of the token and of its
                               two neighbours; where it stands in the context, and in how long a
                               one; 1]

The keys are those before rotation. Heads differ in how they look at what is far away and in how
much a length dilutes them, so without the place too much is lost of contexts that are longer than
those of the fit. Every head's weights are fitted by ridge regression to what was measured on
calibration contexts (`kvtier.heads.probes.reconstruction`). Sources: KVzip for what is predicted
(arXiv 2505.23416), KVzap for predicting it (arXiv 2601.07891); KVzap reads the hidden state, this
the KV, which a pool holds anyway: prefilling computes and stores nothing more.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvtier.errors import UsageError
from kvtier_kernels.scores import Rotation, unrotate

SCHEMA = "kvtier/token-worth/2"
# Share of a feature's mean square that is added to it in a fit.
RIDGE = 1e-3
# Attention below this counts as this much.
LEAST = 1e-6
# Tokens at a context's start that draw attention whatever they are: no example to learn from.
SINK_TOKENS = 4
# Numbers that say where a token stands; see `place_features`.
PLACE_WIDTH = 9
# Tokens of a context whose length counts as 0.
LENGTH_UNIT = 2048
# Tokens whose features are held at a time.
BLOCK_TOKENS = 8192
# The errors that numpy and zipfile raise about a file that is not there, cut off, changed, or not
# theirs.
UNREADABLE = (
    OSError, EOFError, ValueError, KeyError, TypeError, RuntimeError, BadZipFile, zlib.error,
)  # fmt: skip


def own_features(keys: Tensor, values: Tensor, rotation: Rotation | None) -> Tensor:
    """Float32 `[tokens, kv_heads * 2 * (dim + 1)]` of a layer's rotated keys and values, each
    `[kv_heads, tokens, dim]`."""
    plain = keys.float()
    if rotation is not None:
        plain = unrotate(keys, rotation.cos, rotation.sin, interleaved=rotation.interleaved)
    sides = [plain, values.float()]
    norms = [x.norm(dim=-1, keepdim=True) for x in sides]
    return torch.cat([*sides, *norms], dim=-1).transpose(0, 1).flatten(1)


def place_features(begin: int, end: int, context: int, device: torch.device) -> Tensor:
    """Float32 `[end - begin, PLACE_WIDTH]` of the positions begin … end of a context of so many
    tokens."""
    position = torch.arange(begin, end, device=device, dtype=torch.float32)
    share, left = position / context, (context - position) / context
    place = torch.stack(
        [share, share.square(), ((position + 1) / context).log(), left.log()], dim=-1
    )
    # The meaning of a place may change with the length.
    length = math.log(context / LENGTH_UNIT)
    return torch.cat([place, place * length, torch.full_like(place[:, :1], length)], dim=-1)


def features(
    keys: Tensor,
    values: Tensor,
    rotation: Rotation | None,
    first: int = 0,
    context: int | None = None,
) -> Tensor:
    """Float32 `[tokens, width]` of consecutive tokens of a context of so many tokens, the first of
    them at position `first`; other arguments as in `own_features`. Neighbours outside are zero.
    Without `context` it ends with these tokens."""
    own = own_features(keys, values, rotation)
    before, after = pad(own, (0, 0, 1, 0))[:-1], pad(own, (0, 0, 0, 1))[1:]
    end = first + len(own)
    place = place_features(first, end, end if context is None else context, own.device)
    return torch.cat([own, before, after, place, torch.ones_like(own[:, :1])], dim=-1)


def feature_width(kv_heads: int, head_dim: int) -> int:
    """Return the number of a token's features."""
    return 3 * kv_heads * 2 * (head_dim + 1) + PLACE_WIDTH + 1


@dataclass(frozen=True, eq=False)
class TokenWorth:
    """The weights that predict the worth of tokens. weights: float32 `[layers, kv_heads, width]`;
    revision: digest of the model's weights that they were fitted to, "" where it is not known.
    queries: float32 `[layers, kv_heads, dim, dim]`, the mean of q qᵀ over the queries of each KV
    head of the contexts, on any scale, by which keys are coded (kvtier_kernels.codes); None where
    it was not measured."""

    weights: Tensor
    revision: str = ""
    queries: Tensor | None = None

    @cached_property
    def digest(self) -> str:
        """The digest of weights and queries; 16 hexadecimal digits."""
        found = hashlib.sha256(self.weights.cpu().contiguous().numpy().tobytes())
        if self.queries is not None:
            found.update(self.queries.half().cpu().contiguous().numpy().tobytes())
        return found.hexdigest()[:16]

    def to(self, device: torch.device) -> TokenWorth:
        return replace(self, weights=self.weights.to(device))

    def check_fits(self, layers: int, kv_heads: int, head_dim: int, revision: str | None) -> None:
        """Raises UsageError for a model of another shape, or with other weights."""
        width = feature_width(kv_heads, head_dim)
        if tuple(self.weights.shape) != (layers, kv_heads, width):
            expected = f"weights for {layers} layers of {kv_heads} KV heads of {head_dim}"
            raise UsageError("scorer.file", expected, tuple(self.weights.shape))
        seen = (layers, kv_heads, head_dim, head_dim)
        if self.queries is not None and tuple(self.queries.shape) != seen:
            raise UsageError("scorer.file", f"queries {seen}", tuple(self.queries.shape))
        if self.revision and revision and self.revision != revision:
            expected = f"what was fitted to this model's weights ({revision})"
            raise UsageError("scorer.file", expected, self.revision)

    def predict(
        self, layer: int, keys: Tensor, values: Tensor, rotation: Rotation | None, first: int = 0
    ) -> Tensor:
        """ln(attention drawn), float32 `[kv_heads, tokens]`, of all KV heads of a layer, comparable
        over heads and layers.

        keys, values: `[kv_heads, tokens, dim]` of a context's last tokens, keys rotated
        first:        position of the first of them

        Raises UsageError for another shape of model.
        """
        heads = self.weights.shape[1]
        if keys.shape[0] != heads:
            expected = f"all {heads} KV heads of the model that weights were fitted to"
            raise UsageError("keys", expected, tuple(keys.shape))
        found = self.predict_from_kv(layer, keys, values, rotation, range(heads))
        return found + self.predict_from_position(layer, keys.shape[1], first)

    def predict_from_position(self, layer: int, tokens: int, first: int = 0) -> Tensor:
        """The part of a prediction that no KV tells, float32 `[kv_heads, tokens]`, of all KV heads;
        see `predict`."""
        *_, place, always = self._split(layer)
        end = first + tokens
        return place @ place_features(first, end, end, place.device).T + always

    def predict_from_kv(
        self,
        layer: int,
        keys: Tensor,
        values: Tensor,
        rotation: Rotation | None,
        heads: range,
    ) -> Tensor:
        """The part of a prediction that the KV of some heads tells, float32 `[kv_heads, tokens]`,
        of all KV heads: such parts add up.

        keys, values: `[heads, tokens, dim]` of those heads; see `predict`

        Raises UsageError for another shape of model.
        """
        near, *_ = self._split(layer)
        _, tokens, dim = keys.shape
        everyone = near.shape[0]
        if near.shape[1] != 3 * everyone * 2 * (dim + 1) or keys.shape[0] != len(heads):
            expected = f"heads {heads} of the {everyone} KV heads that weights were fitted to"
            raise UsageError("keys", expected, tuple(keys.shape))
        theirs = near.view(everyone, 3, everyone, -1)[:, :, heads.start : heads.stop]
        by_neighbour = theirs.flatten(2).transpose(0, 1).flatten(0, 1)
        products = keys.new_empty(3, everyone, tokens, dtype=torch.float32)
        for begin in range(0, tokens, BLOCK_TOKENS):
            some = slice(begin, begin + BLOCK_TOKENS)
            part = rotation
            if part is not None:
                part = part._replace(cos=part.cos[some], sin=part.sin[some])
            own = own_features(keys[:, some], values[:, some], part)
            products[:, :, some] = (by_neighbour @ own.T).view(3, everyone, -1)
        found = products[0]
        found[:, 1:] += products[1, :, :-1]
        found[:, :-1] += products[2, :, 1:]
        return found

    def _split(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """A layer's weights of what the KV tells, of what the place tells, and of what is
        always so."""
        weights = self.weights[layer]
        told_by_kv = weights.shape[-1] - PLACE_WIDTH - 1
        near, place, always = torch.split(weights, [told_by_kv, PLACE_WIDTH, 1], dim=-1)
        return near, place, always

    def save(self, file: Path) -> None:
        """Write a file that `load` reads, in numpy's format: a second safetensors file beside a
        model would be taken for weights of its. Raises OSError."""
        arrays: dict[str, Any] = {"weights": self.weights.cpu().numpy()}
        if self.queries is not None:
            arrays["queries"] = self.queries.half().cpu().numpy()
        with file.open("wb") as stream:
            np.savez(stream, schema=SCHEMA, revision=self.revision, **arrays)

    @classmethod
    def load(cls, file: Path) -> TokenWorth:
        """Raises UsageError for a file that is not there or holds something else."""
        expected = "weights that `kvtier calibrate tokens` has written"
        try:
            # Opened here: numpy does not close a file that it cannot read.
            with file.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
                schema, revision = str(stored["schema"]), str(stored["revision"])
                weights = torch.from_numpy(stored["weights"])
                queries = None
                if "queries" in stored.files:
                    queries = torch.from_numpy(stored["queries"]).float()
        except UNREADABLE as error:
            raise UsageError("scorer.file", expected, f"{file}: {error}") from error
        if schema != SCHEMA:
            raise UsageError("scorer.file", expected, f"{file}: schema {schema}")
        if weights.ndim != 3 or weights.dtype != torch.float32 or not weights.isfinite().all():
            raise UsageError("scorer.file", expected, f"{file}: {tuple(weights.shape)}")
        if queries is not None and not (queries.ndim == 4 and queries.isfinite().all()):
            raise UsageError("scorer.file", expected, f"{file}: queries {tuple(queries.shape)}")
        return cls(weights, revision, queries)


class Fit:
    """The regression of one model, context by context."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}

    def add(
        self, layer: int, keys: Tensor, values: Tensor, rotation: Rotation | None, drawn: Tensor
    ) -> None:
        """Add the attention that a whole context's tokens drew, `[kv_heads, tokens]`; the other
        arguments are those of `own_features`."""
        tokens = keys.shape[1]
        for begin in range(SINK_TOKENS, tokens, BLOCK_TOKENS):
            end = min(begin + BLOCK_TOKENS, tokens)
            # The part includes the neighbours on both sides, whose own rows are not taken.
            near, part = slice(begin - 1, end + 1), rotation
            if part is not None:
                part = part._replace(cos=part.cos[near], sin=part.sin[near])
            x = features(keys[:, near], values[:, near], part, begin - 1, tokens)
            x = x[1 : 1 + end - begin].double()
            y = drawn[:, begin:end].clamp_min(LEAST).log().double()
            squares, products = self._sums.get(layer, (0, 0))
            self._sums[layer] = squares + x.T @ x, products + x.T @ y.T

    def solve(self) -> TokenWorth:
        """The weights; 0 of layers that nothing was added to. There is one that has been."""
        solved = {layer: _ridge(*sums) for layer, sums in self._sums.items()}
        none = torch.zeros_like(next(iter(solved.values())))
        return TokenWorth(torch.stack([solved.get(n, none) for n in range(self._num_layers)]))


def _ridge(squares: Tensor, products: Tensor) -> Tensor:
    """Weights `[heads, width]` from XᵀX `[width, width]` and Xᵀy `[width, heads]`."""
    # A feature that is always 0 gets the weight 0.
    scale = squares.diagonal().clamp_min(1e-12).rsqrt()
    alike = squares * scale.unsqueeze(-1) * scale
    alike = alike + RIDGE * torch.eye(alike.shape[-1], dtype=alike.dtype, device=alike.device)
    solved = torch.linalg.solve(alike, products * scale.unsqueeze(-1))
    weights: Tensor = solved * scale.unsqueeze(-1)
    return weights.T.float().contiguous()
