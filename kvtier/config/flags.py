"""All settings as flags of a command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kvtier.config.names import RENAMED, flag_of
from kvtier.config.settings import SECTIONS, SETTINGS
from kvtier.errors import ConfigurationError


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every setting, section by section. What is parsed is for `load_settings`."""
    groups = {
        name: parser.add_argument_group(name, kind.__doc__) for name, kind in SECTIONS.items()
    }
    for setting in SETTINGS:
        group = groups.get(setting.section, parser)
        about = setting.field.description
        if setting.is_switch:
            switch = argparse.BooleanOptionalAction
            group.add_argument(*setting.flags, action=switch, default=None, help=about)
        else:
            group.add_argument(*setting.flags, metavar="VALUE", help=about)


def check_flags(flags: Sequence[str]) -> None:
    """Raise ConfigurationError for a flag that is called otherwise now.

    flags: what a parser did not know.
    """
    for flag in flags:
        written = flag.split("=", 1)[0]
        old = written.removeprefix("--").removeprefix("no-").replace("-", "_")
        if written.startswith("--") and old in RENAMED:
            raise ConfigurationError(written, f"the name {flag_of(RENAMED[old])}", written)
