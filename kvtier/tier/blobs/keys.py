"""Names of exact KV: a span of tokens in its context, on one model, in one layout.

A context is cut at multiples of `span_tokens` from its first token, on every server. A span's
name digests every token up to its end, so equal names mean KV of equal tokens:

    tokens    [ span 0 ][ span 1 ][ span 2 ][ tail ]        the tail's name is for its own length
    chain       c0    →   c1    →   c2                      c(i) = H(c(i-1) | tokens of span i)
                ↑                                            c(-1) = H(identity, scope)
    identity: model, revision, dtype, layers, KV heads, head dim, tensor-parallel rank and size,
              what is stored beside the KV, and what the KV was computed under
    scope:    of the request: extra key, cache salt, adapter and prefix memory, which change KV or
              may not share it

So two servers with different models on one tier never see each other's spans, and one that knows a
context's tokens can ask for the longest run of its spans that the tier has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from kvtier.errors import UsageError

KEY_BYTES = 32
SPAN_TOKENS = 256
_TOKEN_DTYPE = "<i8"


@dataclass(frozen=True)
class KvIdentity:
    """The owner of KV, and what its bytes mean: everything that must agree before KV is shared.

    revision: of everything that computes KV: the weights as they are loaded, the configuration as
            it is resolved, and the arguments that change what is computed.
    dtype:  of the stored elements, by torch's name without `torch.`
    policy: digest of the retention policy that earlier tokens were under when this KV was
            computed; "" for KV that was computed with nothing dropped, which every policy may use.
    scores: digest of the rule behind the scores that are stored beside the KV, "" without scores.
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
    policy: str = ""
    scores: str = ""

    @cached_property
    def digest(self) -> bytes:
        """32 bytes; equal only for equal identities."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(b"kvtier/identity/2\0" + text.encode()).digest()


@dataclass(frozen=True)
class Scope:
    """Contexts of equal tokens share KV only where they agree in all of this.

    extra_key, cache_salt: the request's, "" for none.
    adapter: digest of the contents of its LoRA adapter, "" for none.
    memory:  digest of the prefix memory that it is computed behind, "" for none.
    memory_tokens: how long the memory's prefix is. Those tokens have no KV: in a span that they are
             part of, zeros are in their place.
    share:   the share that its turns keep at most, None where the server's rule alone decides.
    """

    extra_key: str = ""
    cache_salt: str = ""
    adapter: str = ""
    memory: str = ""
    memory_tokens: int = 0
    share: float | None = None

    def encode(self) -> bytes:
        """Equal only for equal scopes: each part behind its length. Keys of requests may be any
        JSON string, half of a surrogate pair included."""
        parts = [self.extra_key, self.cache_salt, self.adapter]
        if self.memory or self.share is not None:
            parts.append(self.memory)
        if self.share is not None:
            parts.append(repr(self.share))
        encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
        return b"".join(len(part).to_bytes(8, "little") + part for part in encoded)


class SpanChain:
    """The names of one context's spans, as the context grows. See the module docstring.

    keys:       of the whole spans so far.
    num_tokens: so far.

    Raises UsageError for spans of another length than 1 … 2^31 - 1.
    """

    def __init__(
        self, identity: KvIdentity, span_tokens: int = SPAN_TOKENS, scope: Scope = Scope()
    ) -> None:
        if not 1 <= span_tokens < 1 << 31:
            raise UsageError("span_tokens", "1 … 2^31 - 1", span_tokens)
        root = identity.digest + span_tokens.to_bytes(4, "little") + scope.encode()
        self.span_tokens = span_tokens
        self.keys: list[bytes] = []
        self._root = hashlib.sha256(root).digest()
        self._tail = np.empty(0, _TOKEN_DTYPE)

    @property
    def num_tokens(self) -> int:
        return len(self.keys) * self.span_tokens + len(self._tail)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens. Raises UsageError for what is no 64-bit integer."""
        tokens = np.asarray(token_ids)
        if tokens.size == 0:
            return
        if tokens.dtype.kind != "i" or tokens.ndim != 1:
            raise UsageError("token_ids", "a sequence of 64-bit integers", f"{tokens.dtype}")
        tokens = np.concatenate((self._tail, tokens.astype(_TOKEN_DTYPE)))
        whole = len(tokens) // self.span_tokens * self.span_tokens
        for span in tokens[:whole].reshape(-1, self.span_tokens):
            self.keys.append(self.key(len(self.keys), span))
        self._tail = tokens[whole:]

    def _link(self, spans: int) -> bytes:
        """Return the link that names everything before span number `spans`."""
        return self.keys[spans - 1] if spans else self._root

    def key(self, spans: int, token_ids: ArrayLike) -> bytes:
        """The name of a whole span: `token_ids` after the first `spans` spans."""
        span = np.asarray(token_ids, dtype=_TOKEN_DTYPE).tobytes()
        return hashlib.sha256(self._link(spans) + span).digest()

    def tail_key(self, spans: int, tail_ids: Sequence[int]) -> bytes:
        """The name of a last span that is not whole: `tail_ids` after the first `spans` spans."""
        tail = np.asarray(tail_ids, dtype=_TOKEN_DTYPE).tobytes()
        return hashlib.sha256(b"kvtier/tail\0" + self._link(spans) + tail).digest()

    def turns_key(self, spans: int) -> bytes:
        """The name of the record of turns that end within span number `spans`."""
        return hashlib.sha256(b"kvtier/turns\0" + self._link(spans)).digest()
