"""The `kvtier` command.

    kvtier env                print the effective configuration and versions
    kvtier calibrate          find a model's head profile and curve, and store both
    kvtier calibrate heads    only find out which KV heads need the whole context
    kvtier calibrate curve    only fit the curve of a head profile
    kvtier calibration        list, show, export, import and delete stored calibrations
    kvtier memory             build, show, verify and publish prefix memories
    kvtier plan               how many GPUs a workload needs, with and without kvtier
    kvtier trace              why a server computed tokens of prompts again, from its log
    kvtier serve              SGLang's server with kvtier's cache (installed by kvtier_sglang)
    kvtier check              what recorded sessions lose on such a server

Commands of other packages arrive through the entry point group `kvtier.commands`, so that the
core imports neither the engine nor a server.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version

from kvtier import __version__
from kvtier.calibration.cli import add_calibrate_parser
from kvtier.calibration.store_cli import add_calibration_parser
from kvtier.config import SETTINGS, config_file, load_settings
from kvtier.errors import KvtierError
from kvtier.memory.cli import add_memory_parser
from kvtier.plan.cli import add_plan_parser
from kvtier.traffic.cli import add_trace_parser

COMMANDS_GROUP = "kvtier.commands"
# The extra of the wheel that brings what a command imports.
EXTRAS = {
    "calibrate": "calibrate",
    "check": "sglang",
    "memory": "calibrate",
    "plan": "plan",
    "serve": "sglang",
    "tier": "tier",
}
_SHOWN_VERSIONS = ("sglang", "torch", "transformers", "triton", "flashinfer_python", "numpy")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 fine, 2 bad input, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    external = _external_commands()
    try:
        if arguments and arguments[0] in external:
            handler: Callable[[list[str]], int] = external[arguments[0]].load()
            return handler(arguments[1:])
        options = _parser(external).parse_args(arguments)
        return int(options.handler(options))
    except KvtierError as error:
        print(f"kvtier: error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(next(iter(arguments), ""))
        if extra is None or str(error.name).startswith("kvtier"):
            raise
        wanted = f"pip install 'kvtier[{extra}]' brings what this command needs"
        print(f"kvtier: error: {error}; {wanted}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _external_commands() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=COMMANDS_GROUP)}


def _parser(external: dict[str, EntryPoint]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvtier", description=__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"kvtier {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    env = commands.add_parser("env", help="print the effective configuration and versions")
    env.set_defaults(handler=lambda options: print_environment())
    add_calibrate_parser(commands)
    add_calibration_parser(commands)
    add_memory_parser(commands)
    add_plan_parser(commands)
    add_trace_parser(commands)
    for name, entry in sorted(external.items()):
        # Listed for --help only: `main` hands their arguments over before parsing.
        commands.add_parser(name, help=f"see `kvtier {name} --help` ({entry.value})")
    return parser


def print_environment() -> int:
    """`kvtier env`: every setting with its value, where a file came from, and versions."""
    settings = load_settings()
    print(f"kvtier {__version__}, Python {sys.version.split()[0]}")
    for name in _SHOWN_VERSIONS:
        print(f"  {name:<18} {_version(name)}")
    print(f"configuration file: {config_file() or 'none'}")
    shown = settings.shown()
    for setting in SETTINGS:
        source = "" if setting.is_given(settings) else "  (default)"
        print(f"  {setting.variables[0]:<36} {shown[setting.path]}{source}")
    return 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
