"""A benchmark's command line: what it can be told, and what it refuses by name."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.errors import UsageError
from kvtier.sizes import parse_size

Options = argparse.Namespace
DEMO_MODEL = Path(__file__).resolve().parents[2] / "models" / "kvtier-demo"


class Arguments:
    """Declares the flags of one benchmark; bounds are checked once all of them are parsed.

    A value out of bounds raises UsageError, which names the flag. A word where a number belongs is
    argparse's own error.
    """

    def __init__(self, name: str, description: str) -> None:
        self._parser = argparse.ArgumentParser(
            prog=f"benchmarks.{name}", description=description.split("\n")[0]
        )
        self._checks: list[Callable[[Options], None]] = []
        self._other_defaults: dict[str, Mapping[str, Any]] = {}
        self.add = self._parser.add_argument

    def whole(
        self, flag: str, default: int, about: str, *, least: int = 1, most: float = math.inf
    ) -> None:
        """A whole number from `least` to `most`."""
        self.add(flag, type=int, default=default, help=f"{about} (%(default)s)")
        expected = f"at least {least}" if most == math.inf else f"{least} to {most}"
        self._bounds(flag, lambda value: least <= value <= most, expected)

    def number(
        self, flag: str, default: float, about: str, *, most: float = math.inf, metavar: str = "N"
    ) -> None:
        """A number above 0, up to `most`."""
        self.add(flag, type=float, default=default, metavar=metavar, help=f"{about} (%(default)s)")
        expected = "more than 0" if most == math.inf else f"a number in (0, {most:g}]"
        self._bounds(flag, lambda value: 0 < value <= most, expected)

    def shares(self, flag: str, default: Sequence[float], about: str) -> None:
        """One or more numbers in (0, 1]."""
        shown = f"{about} ({' '.join(map(str, default))})"
        self.add(flag, type=float, nargs="+", default=list(default), metavar="SHARE", help=shown)
        self._bounds(flag, lambda values: all(0 < one <= 1 for one in values), "numbers in (0, 1]")

    def size(self, flag: str, default: str, about: str, *, least: int = 1) -> None:
        """Tokens or bytes, such as 4k; the option is a whole number."""
        self.add(flag, default=default, metavar="SIZE", help=f"{about} (%(default)s)")
        self._read(flag, lambda text: parse_size(text, flag))
        self._bounds(flag, lambda value: value >= least, f"at least {least}")

    def sizes(self, flag: str, default: Sequence[str], about: str) -> None:
        """One or more numbers of tokens or bytes."""
        shown = f"{about} ({' '.join(default)})"
        self.add(flag, nargs="+", default=list(default), metavar="SIZE", help=shown)
        self._read(flag, lambda texts: [parse_size(text, flag) for text in texts])

    def model(self) -> None:
        """--model-path."""
        about = "a model of the recall language (the demo model)"
        self.add("--model-path", type=Path, default=DEMO_MODEL, metavar="DIR", help=about)

    def other_defaults(self, flag: str, values: Mapping[str, Any]) -> None:
        """Set the defaults of other flags, by their names without dashes, where `flag` is given and
        they are not."""
        self._other_defaults[_name(flag)] = values

    def check(self, check: Callable[[Options], None]) -> None:
        """Run a check over all options once they are parsed; it raises UsageError."""
        self._checks.append(check)

    def parse(self, argv: Sequence[str] | None) -> Options:
        """The options, checked. Raises UsageError; SystemExit where argparse refuses a flag."""
        options = self._parser.parse_args(argv)
        for flag, values in self._other_defaults.items():
            if getattr(options, flag):
                self._parser.set_defaults(**values)
                options = self._parser.parse_args(argv)
        for check in self._checks:
            check(options)
        return options

    def _bounds(self, flag: str, fits: Callable[[Any], bool], expected: str) -> None:
        def check(options: Options) -> None:
            value = getattr(options, _name(flag))
            if not fits(value):
                raise UsageError(flag, expected, value)

        self.check(check)

    def _read(self, flag: str, read: Callable[[Any], Any]) -> None:
        name = _name(flag)
        self.check(lambda options: setattr(options, name, read(getattr(options, name))))


def _name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")
