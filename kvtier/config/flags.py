"""All settings as flags of a command."""

from __future__ import annotations

import argparse

from kvtier.config.settings import SECTIONS, SETTINGS


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
