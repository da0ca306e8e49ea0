"""Names of exact KV: a span of tokens in its context, on one model, in one layout.

A context is cut at multiples of `span_tokens` from its first token, whoever computes it. A span's
name digests every token up to its end, so equal names mean equal KV:

    tokens    [ span 0 ][ span 1 ][ span 2 ][ tail ]        the tail has no name yet
    chain       c0    →   c1    →   c2                      c(i) = H(c(i-1) | tokens of span i)
                ↑                                            c(-1) = H(identity, extra key)
    identity: model, revision, dtype, layers, KV heads, head dim, tensor-parallel rank and size
    extra key: SGLang's, of the request: adapter and cache salt, which change KV or may not share it

So two servers with different models on one tier never see each other's spans, and whoever knows a
context's tokens can ask for the longest run of its spans that the tier has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from kvtier.errors import UsageError

KEY_BYTES = 32
SPAN_TOKENS = 256
_TOKEN_DTYPE = "<i8"


@dataclass(frozen=True)
class KvIdentity:
    """Whose KV it is, and what its bytes mean: everything that must agree before KV is shared.

    dtype: of the stored elements, by torch's name without `torch.`
    A rank stores its own KV heads; `num_kv_heads` are those of the rank.
    """

    model: str
    revision: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    tp_rank: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "tp_size"):
            check_count(name, getattr(self, name))
        if not 0 <= self.tp_rank < self.tp_size:
            raise UsageError("tp_rank", f"0 … {self.tp_size - 1}", self.tp_rank)

    def digest(self) -> bytes:
        """32 bytes; equal only for equal identities."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(b"kvtier/identity/1\0" + text.encode()).digest()


def check_count(name: str, value: object) -> None:
    """Raise UsageError unless `value` is a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(name, "a whole number of at least 1", value)


def span_keys(
    identity: KvIdentity,
    token_ids: Sequence[int],
    span_tokens: int = SPAN_TOKENS,
    extra_key: str = "",
) -> list[bytes]:
    """The names of the whole spans of a context, in order; what is left over has none.

    Raises UsageError for spans of another length than 1 … 2^31 - 1 and for tokens that are no
    64-bit integers.
    """
    if not 1 <= span_tokens < 1 << 31:
        raise UsageError("span_tokens", "1 … 2^31 - 1", span_tokens)
    tokens = np.asarray(token_ids)
    if tokens.size and (tokens.dtype.kind != "i" or tokens.ndim != 1):
        raise UsageError("token_ids", "a sequence of 64-bit integers", f"{tokens.dtype}")
    whole = len(token_ids) // span_tokens
    tokens = tokens[: whole * span_tokens].astype(_TOKEN_DTYPE)
    root = identity.digest() + span_tokens.to_bytes(4, "little") + extra_key.encode()
    chain = hashlib.sha256(root).digest()
    keys = []
    for span in tokens.reshape(whole, span_tokens):
        chain = hashlib.sha256(chain + span.tobytes()).digest()
        keys.append(chain)
    return keys
