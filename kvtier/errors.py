"""Every error kvtier raises on purpose.

    KvtierError
    ├── UsageError (also ValueError)        bad input: names the argument and what was expected
    │   ├── UnknownPolicyError              a bench policy that does not exist
    │   ├── SizeError                       --len and friends: not a size, or out of range
    │   ├── BudgetError                     a KV budget that cannot hold one session
    │   ├── ConfigurationError              kvtier's own settings or configuration file
    │   ├── SamplesFileError                --samples-file: which line and field of it
    │   ├── TracesFileError                 --traces: which line and field of it
    │   ├── UnsupportedModelError           MLA, SSM, sliding-window layers: heads cannot be split
    │   └── IncompatibleFlagError           an SGLang flag that cannot be combined with kvtier
    ├── HeadProfileError (also ValueError)  a head profile that is malformed
    │   └── HeadProfileMismatchError        ... or belongs to another model or shape
    ├── CalibrationDocumentError (also ValueError)  a stored calibration document that is malformed
    │   └── CalibrationMismatchError        ... or was measured on another model, policy or dtype
    ├── StoreError (also RuntimeError)      the calibration store did not do what was asked
    │   ├── StoreUnavailableError           down, unreachable, too slow, or no Redis at all
    │   └── StoreRefusedError               wrong password, no permission, read-only, out of memory
    ├── TierError (also RuntimeError)       the KV tier did not do what was asked
    │   ├── TierUnavailableError            down, unreachable, too slow, or given up on for now
    │   ├── TierRefusedError                unknown or foreign namespace, another user's socket
    │   ├── TierExhaustedError              no room: quota, in-flight limit, memory or disk full
    │   ├── TierIntegrityError              bytes that are not what was stored under their name
    │   └── TierProtocolError               another protocol version, or nonsense
    ├── MemoryFileError (also ValueError)   a prefix memory's directory that is malformed
    │   └── MemoryMismatchError             ... or is of another model, prefix or dtype
    └── StartupError (also RuntimeError)    the SGLang plugin did not take; the server must stop

Anything else that escapes is a bug.
"""

from __future__ import annotations


class KvtierError(Exception):
    """Base of all errors raised by kvtier on purpose."""


class UsageError(KvtierError, ValueError):
    """Bad input. `argument` is the flag or parameter the user has to change."""

    def __init__(self, argument: str, expected: str, got: object) -> None:
        self.argument = argument
        self.expected = expected
        self.got = got
        super().__init__(f"{argument}: expected {expected}, got {got!r}")

    def __reduce__(self) -> tuple[type[UsageError], tuple[str, str, object]]:
        return type(self), (self.argument, self.expected, self.got)


class UnknownPolicyError(UsageError):
    """A bench policy that does not exist."""


class SizeError(UsageError):
    """A size such as --len that does not parse or is out of range."""


class BudgetError(UsageError):
    """A KV budget too small for one session."""


class ConfigurationError(UsageError):
    """A kvtier setting or configuration file that does not validate."""


class SamplesFileError(UsageError):
    """A file of calibration samples that is malformed; `argument` names file, line and field."""


class TracesFileError(UsageError):
    """A file of traces that is malformed; `argument` names file, line and field."""


class UnsupportedModelError(UsageError):
    """A model whose KV heads kvtier cannot split."""


class IncompatibleFlagError(UsageError):
    """An SGLang flag that cannot be combined with kvtier."""


class HeadProfileError(KvtierError, ValueError):
    """A head profile file that cannot be read or violates its own format."""


class HeadProfileMismatchError(HeadProfileError):
    """A head profile made for another model, revision or shape."""


class CalibrationDocumentError(KvtierError, ValueError):
    """A calibration document that cannot be read or violates its own format."""


class CalibrationMismatchError(CalibrationDocumentError):
    """A calibration document measured on another model, revision, policy or dtype."""


class MemoryFileError(KvtierError, ValueError):
    """A prefix memory's directory that cannot be read or violates its own format."""


class MemoryMismatchError(MemoryFileError):
    """A prefix memory of another model, revision, tokenizer, dtype or rotation, or whose card says
    that it must not be served."""


class StoreError(KvtierError, RuntimeError):
    """The calibration store did not do what was asked. No password is ever in the message."""


class StoreUnavailableError(StoreError):
    """The store is down, unreachable or too slow; asking again later may help."""


class StoreRefusedError(StoreError):
    """The store answered and said no; an operator has to change something."""


class TierError(KvtierError, RuntimeError):
    """The KV tier did not do what was asked. For serving it is a miss, never a user's error."""


class TierUnavailableError(TierError):
    """The tier or its medium is down, unreachable or too slow; asking later may help."""


class TierRefusedError(TierError):
    """The tier answered and said no; an operator has to change something."""


class TierExhaustedError(TierError):
    """An error of a service without room: a quota, an in-flight limit, or memory or disk is
    full."""


class TierIntegrityError(TierError):
    """Bytes that are not, bit by bit, what was stored under their name."""


class TierProtocolError(TierError):
    """The other side speaks another protocol version, or its answer makes no sense."""


class StartupError(KvtierError, RuntimeError):
    """The SGLang plugin did not take effect; serving would silently be something else."""
