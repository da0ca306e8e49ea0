"""Settings: one frozen object, validated once, read nowhere else from the environment.

names.py       what a setting is called in the program, in the file, as a variable and as a flag
sections.py    the tables of the file, each with its own rules
settings.py    all settings, and the rules between sections
loading.py     flags > KVTIER_* variables > the file > defaults; and the flags of a command
"""

from kvtier.config.loading import config_file, load_settings
from kvtier.config.names import ENV_PREFIX, Setting
from kvtier.config.settings import SECTIONS, SETTINGS, PrefillCompression, Settings

__all__ = [
    "ENV_PREFIX",
    "SECTIONS",
    "SETTINGS",
    "PrefillCompression",
    "Setting",
    "Settings",
    "config_file",
    "load_settings",
]
