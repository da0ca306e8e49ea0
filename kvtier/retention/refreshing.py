"""One layer's refresh: from exact KV and a turn's own queries to the entries that CA heads keep.

exact KV       [ span ][ span ][ span ][ span ]        every token, every KV head
pruned ranges      |~~~~~~~~|    |~~~~~|               tokens of which `kept` shall stay
entries             e  e   e      e  e    (+ 1)        per range and CA head; with merging one
                                                       more, for what is like none of them
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvtier.retention.keepkv import KeepKV, QueryWindow

# Share of a head's entries that a turn's own queries choose where heads compete. By trials on texts
# that nothing is measured on, at a tenth of the bytes .87 of the context's worth is kept by a half
# or a quarter, .78 by all, .86 by none; at a quarter of them, when each head still had an entry for
# what it dropped, 1.00, .96 and .98.
QUESTION_SHARE = 0.5


@dataclass(frozen=True)
class PrunedRange:
    """Tokens [begin, end) of a context of which CA heads keep `kept` entries."""

    begin: int
    end: int
    kept: int

    def __post_init__(self) -> None:
        assert 0 <= self.begin < self.end, "an empty range"
        assert 0 < self.kept <= self.end - self.begin, "a range that keeps nothing, or too much"


class Chosen(NamedTuple):
    """The entries that the CA heads of a layer keep of one pruned range.

    k, v:      `[heads, n, dim]` in the dtype of the exact KV; n is `kept`, and one more where
               entries are merged
    log_votes: float32 `[heads, group, n]`, None where every entry stands for itself
    """

    k: torch.Tensor
    v: torch.Tensor
    log_votes: torch.Tensor | None


@dataclass(frozen=True)
class RefreshRule:
    """The rule by which a refresh chooses.

    keepkv: ranks the tokens, and merges them.
    merges: whether tokens that are not kept are merged into those that are, or dropped.
    """

    keepkv: KeepKV
    merges: bool

    def choose(self, k: torch.Tensor, v: torch.Tensor, count: int, window: QueryWindow) -> Chosen:
        """Keep `count` of k, v `[heads, tokens, dim]`; the others are in the compensation entry,
        the last one, as far as they are like none of the kept. Raises UsageError."""
        if not self.merges:
            kept = self.keepkv.select(k, v, count, window).unsqueeze(-1)
            own = kept.expand(-1, -1, k.shape[-1])
            return Chosen(k.gather(1, own), v.gather(1, own), None)
        return self._merged(k, v, count, window, None)

    def choose_by_worth(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        worth: torch.Tensor,
        count: int,
        window: QueryWindow,
    ) -> Chosen:
        """`count` entries of one head where heads compete, see `reselect`; with merging, one of
        them is the compensation entry. Raises UsageError."""
        merges = self.merges and count > 1
        kept = reselect(self.keepkv, k, v, worth, count - merges, window)
        if merges:
            scores = torch.zeros_like(worth).index_fill_(0, kept, 1.0)
            return self._merged(k, v, count - 1, window, scores[None])
        votes = k.new_zeros(1, window.q.shape[2], count, dtype=torch.float32)
        return Chosen(k[:, kept], v[:, kept], votes if self.merges else None)

    def _merged(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        count: int,
        window: QueryWindow,
        scores: torch.Tensor | None,
    ) -> Chosen:
        """The best `count` entries with the others merged into them, and the compensation entry."""
        retained = self.keepkv.retain(k, v, count, window=window, scores=scores)
        group = window.q.shape[2]
        parts = (retained.entries, retained.compensation)
        return Chosen(
            torch.cat([part.k for part in parts], dim=1).to(k.dtype),
            torch.cat([part.v for part in parts], dim=1).to(v.dtype),
            torch.cat([part.log_votes.float().expand(-1, group, -1) for part in parts], dim=2),
        )


def reselect(
    keepkv: KeepKV,
    k: torch.Tensor,
    v: torch.Tensor,
    worth: torch.Tensor,
    count: int,
    window: QueryWindow,
) -> torch.Tensor:
    """Return the tokens that one head keeps of a range for one turn: a part by what tokens are
    worth to any turn, the rest by the turn's own queries. int64 `[count]`, in order of position.

    k, v: `[1, tokens, dim]`, exact; worth: float32 `[tokens]`, higher = keep; count: 0 … tokens;
    window: the head's newest queries. The question alone costs answers: it was read before what it
    will need later was looked at (docs/measured.md). Raises UsageError.
    """
    asked = int(count * QUESTION_SHARE)
    kept = worth.topk(count - asked).indices
    if asked:
        left = torch.ones_like(worth, dtype=torch.bool)
        left[kept] = False
        others = torch.nonzero(left).flatten()
        found = keepkv.select(k[:, others], v[:, others], asked, window)[0]
        kept = torch.cat([kept, others[found]])
    return kept.sort().values
