"""The sections of the settings: each is a table of the file, and has rules of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_core import PydanticCustomError

from kvtier.addresses import (
    DEFAULT,
    UNIX,
    default_address,
    host_of,
    parse_address,
    socket_path,
)
from kvtier.config.names import Section
from kvtier.errors import UsageError

REFUSAL = "setting"


def refusal(field: str, expected: str, got: Any) -> PydanticCustomError:
    """Return the error that a rule over several settings raises about one of them.

    field: its name in the model that the rule belongs to, such as span_tokens or tier.span_tokens.
    """
    context = {"field": field, "expected": expected, "got": got}
    return PydanticCustomError(REFUSAL, "{expected}", context)


class LocalitySettings(Section):
    """The tokens that every head keeps of a context, whatever it drops of the rest."""

    # The defaults where heads compete, and those where they do not: locality heads keep nothing but
    # these.
    COMPETING: ClassVar[dict[str, int]] = {
        "sink_tokens": 4, "recent_tokens": 16, "branch_recent_tokens": 0, "recent_of": 128,
    }  # fmt: skip
    LOCALITY: ClassVar[dict[str, int]] = {
        "sink_tokens": 128, "recent_tokens": 256, "branch_recent_tokens": 128, "recent_of": 1,
    }  # fmt: skip

    sink_tokens: int | None = Field(
        None,
        ge=0,
        description="First tokens of a context that all heads always keep. None: 4 where heads "
        "compete, else 128.",
    )
    recent_tokens: int | None = Field(
        None,
        ge=1,
        description="Last tokens of each turn's prompt that all heads keep. None: one in 128 of "
        "the prompt where heads compete, 1 at least and 16 at most; else 256.",
    )
    branch_recent_tokens: int | None = Field(
        None,
        ge=0,
        description="A request may leave a compressed node inside its recent window as long as "
        "this many recent tokens stay before the branch. None: 0 where heads compete, else 128.",
    )
    compensation: bool = Field(
        True, description="Represent a node's dropped tokens by one voted entry (RazorAttention)."
    )

    def windows(self, *, competes: bool) -> dict[str, int]:
        """The windows of a LocalityRule. competes: whether heads compete."""
        windows = dict(self.COMPETING if competes else self.LOCALITY)
        if self.recent_tokens is not None:
            windows["recent_of"] = 1
        given = {name: getattr(self, name, None) for name in windows}
        return windows | {name: tokens for name, tokens in given.items() if tokens is not None}

    def kept_tokens(self, *, competes: bool) -> int:
        """Return the number of tokens of a long prompt that all heads keep."""
        windows = self.windows(competes=competes)
        return windows["sink_tokens"] + windows["recent_tokens"]


class BudgetSettings(Section):
    """A fixed budget of what CA heads keep of a session, instead of a share of every context."""

    tokens: int | None = Field(
        None, ge=1, description="CA entries that a session's prompts may hold."
    )
    bytes: int | None = Field(
        None, ge=1, description="The same in bytes of one session's CA entries."
    )


class ScorerSettings(Section):
    """The scorer that chooses the tokens that CA heads keep."""

    main: ClassVar[str | None] = "name"

    name: str | None = Field(
        None,
        description="Which tokens CA heads keep: distinct-keys, compactor, keydiff, … None: "
        "reconstruction where heads compete, else distinct-keys.",
    )
    leverage_weight: float = Field(
        1.0, ge=0, description="Weight of key leverage beside attention (compactor)."
    )
    window_tokens: int = Field(
        256, ge=2, description="Tokens that attend to each other when scored (compactor)."
    )
    pool_width: int = Field(
        5, ge=1, description="Neighbouring tokens that share their score; odd (compactor)."
    )
    file: Path | None = Field(
        None, description="What `kvtier calibrate tokens` fitted (reconstruction)."
    )

    @field_validator("pool_width")
    @classmethod
    def _has_a_middle(cls, width: int) -> int:
        if width % 2 == 0:
            raise PydanticCustomError("pool_width", "an odd number of tokens")
        return width


class RedisSettings(Section):
    """The Redis that holds calibrations."""

    url: SecretStr | None = Field(
        None,
        description="redis://, rediss:// or unix://, with user and password. None: files "
        "in data_dir.",
    )
    ca: Path | None = Field(
        None,
        description="Certificate authorities to trust for rediss:// (PEM). None: the system's.",
    )
    certificate: Path | None = Field(
        None,
        description="This client's certificate (PEM), for a Redis that asks for one (mutual TLS); "
        "a renewed one is taken at the next connection.",
    )
    key: Path | None = Field(None, description="Key of the certificate (PEM).")
    timeout_s: float = Field(
        0.5,
        gt=0,
        le=60,
        description="Longest wait for a connection or an answer of Redis. Reading or writing one "
        "document has a deadline of four times this over all it does, a list of twenty times.",
    )

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None:
            try:
                parse_address(url.get_secret_value())
            except ValueError as error:
                raise PydanticCustomError("redis_url", "{why}", {"why": str(error)}) from None
        return url

    @model_validator(mode="after")
    def _tls_is_used(self) -> Self:
        files = {"ca": self.ca, "certificate": self.certificate, "key": self.key}
        given = {name: path for name, path in files.items() if path is not None}
        for name, path in given.items():
            if self.url is None or parse_address(self.url.get_secret_value()).scheme != "rediss":
                # A user who names an authority or a certificate means to be encrypted.
                raise refusal(name, "a rediss:// url of Redis beside it", path)
            if not path.is_file():
                raise refusal(name, "an existing PEM file", path)
        if (self.certificate is None) != (self.key is None):
            missing = "key" if self.key is None else "certificate"
            raise refusal(missing, "certificate and key of Redis together", None)
        return self


class CalibrationSettings(Section):
    """The life of stored calibrations, and how a server follows them."""

    ttl_s: int = Field(
        90 * 86400,
        ge=1,
        description="Seconds that a calibration stays in Redis after it was stored, or a server "
        "read it.",
    )
    poll_s: float = Field(
        5.0, gt=0, description="Seconds between looks for a changed curve while serving."
    )


class RefreshSettings(Section):
    """The time at which CA heads choose again what they keep, from the exact KV in the tier."""

    main: ClassVar[str | None] = "when"

    when: Literal["off", "turn"] = Field(
        "off",
        description="turn: when a turn begins, CA heads choose again what they keep, with its own "
        "questions, from the exact KV in the tier.",
    )
    queries: int = Field(32, ge=1, description="Newest queries that choose what a refresh keeps.")

    @property
    def is_on(self) -> bool:
        return self.when != "off"


class MergeSettings(Section):
    """The treatment of tokens that a refresh does not keep."""

    main: ClassVar[str | None] = "form"

    form: Literal["off", "keepkv"] = Field(
        "off", description="off: drop them. keepkv: merge them into those that are kept."
    )
    floor: float = Field(
        0.9, ge=-1, le=1, description="Cosine similarity of keys up to which nothing is merged."
    )

    @property
    def is_on(self) -> bool:
        return self.form != "off"


class TierSettings(Section):
    """The KV tier that keeps exact KV."""

    main: ClassVar[str | None] = "address"

    address: str | None = Field(
        None,
        description="host:port, unix:/path, or default, where `kvtier tier` listens by default. "
        "None: no tier.",
    )
    namespace: str = Field(
        "default",
        min_length=1,
        max_length=200,
        description="Whose KV it is in the tier; with TLS the common name of the certificate.",
    )
    ca: Path | None = Field(
        None,
        description="Certificate authority of the tier (PEM); with it the tier is spoken to over "
        "mutual TLS.",
    )
    certificate: Path | None = Field(None, description="This server's certificate (PEM).")
    key: Path | None = Field(None, description="Key of the certificate (PEM).")
    timeout_s: float = Field(
        1.0,
        gt=0,
        le=60,
        description="Longest wait for an answer of the tier that carries no KV; KV gets more.",
    )
    patience_s: float | None = Field(
        None,
        gt=0,
        le=3600,
        description="Longest that a request waits for KV from the tier, which is then asked "
        "whatever was measured. None: as long as computing the KV would take, 30 s at the most; "
        "and where loading was slower of late, it is not asked.",
    )
    span_tokens: int = Field(
        256,
        ge=16,
        description="Tokens of one blob in the tier.",
    )
    buffer_bytes: int = Field(
        1 << 30, ge=1 << 20, description="Host memory for KV on its way to and from the tier."
    )
    shared_memory: bool = Field(
        True, description="Move KV through shared memory where the tier is on this host."
    )
    drain_s: float = Field(
        10.0,
        ge=0,
        le=12,
        description="Seconds that a server which is asked to end waits for KV on its way to the "
        "tier. SGLang kills its scheduler 15 s after the last request ended.",
    )

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, address: str | None) -> str | None:
        if address == DEFAULT:
            address = default_address()
        if address is not None:
            try:
                path = socket_path(address, "tier")
            except UsageError as error:
                raise PydanticCustomError("tier", "{why}", {"why": error.expected}) from None
            if path is None and host_of(address) is None:
                raise PydanticCustomError("tier", "host:port, unix:/path or default")
        return address

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        files = {"ca": self.ca, "certificate": self.certificate, "key": self.key}
        if self.address is None or not any(files.values()):
            return self
        if self.address.startswith(UNIX):
            name, given = next((name, path) for name, path in files.items() if path is not None)
            raise refusal(name, "a tier at host:port beside it", given)
        for name, path in files.items():
            if path is None:
                raise refusal(name, "ca, certificate and key of the tier together", None)
            if not path.is_file():
                raise refusal(name, "an existing PEM file", path)
        return self
