"""`kvtier serve`: SGLang's own server with kvtier's cache and attention.

kvtier's flags are the settings of kvtier.config (--head-profile, --tier, ...); every other flag
goes to SGLang unchanged.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import Any

from kvtier.calibration.defaults import fitted_worth
from kvtier.config import Settings, load_settings
from kvtier.config.flags import add_flags
from kvtier.errors import StartupError, UsageError
from kvtier.heads.model.config import located
from kvtier_sglang.compat import NAME


def main(argv: list[str]) -> int:
    """Serve until interrupted. Raises KvtierError for bad input, before any model loads."""
    options, sglang_flags = _parser().parse_known_args(argv)
    flags = vars(options)
    calibrate = flags.pop("calibrate")
    settings = load_settings(**flags)
    if calibrate:
        _calibrate(settings, sglang_flags)
    # SGLang's processes are spawned: the environment is how settings reach them.
    os.environ.update(settings.to_env())
    launch(with_defaults(sglang_flags))
    return 0


def _calibrate(settings: Settings, sglang_flags: list[str]) -> None:
    """Calibrate the model in a process of its own, which gives all memory back, unless that was
    done. Raises StartupError where it fails, which says why."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", "--model")
    parser.add_argument("--revision")
    served, _ = parser.parse_known_args(sglang_flags)
    if served.model_path is None:
        raise UsageError("--calibrate", "a --model-path beside it", None)
    model = located(served.model_path, served.revision)
    if fitted_worth(settings, model) is not None:
        return
    command = [sys.executable, "-m", "kvtier", "calibrate", "--model-path", model]
    command += ["--parts", "tokens"]
    done = subprocess.run(command, env=os.environ | settings.to_env(), check=False)
    if done.returncode != 0:
        raise StartupError(f"`{' '.join(command[1:])}` failed: exit code {done.returncode}")


def launch(sglang_flags: list[str]) -> None:
    """Start SGLang's server in this process with the given flags."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from kvtier_sglang import compat, plugin

    load_plugins()
    plugin.verify()
    server_args = prepare_server_args(sglang_flags)
    compat.check_server_args(server_args, compat.settings_of(server_args))
    if compat.uses_kvtier(server_args):
        _mount_status(server_args)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _mount_status(server_args: Any) -> None:
    """Add the status page to SGLang's HTTP server, where that is one process: in several SGLang
    looks at no keys."""
    if server_args.tokenizer_worker_num > 1:
        return
    from sglang.srt.entrypoints import http_server

    from kvtier_sglang.status.routes import mount

    mount(http_server.app, lambda: http_server.get_global_state().tokenizer_manager)


def with_defaults(flags: list[str]) -> list[str]:
    """SGLang's flags plus those that make it kvtier's, where the user did not choose."""
    import torch

    defaults = {"--attention-backend": NAME, "--radix-cache-backend": NAME}
    if not torch.cuda.is_available():
        defaults["--device"] = "cpu"
    given = {flag.split("=", 1)[0] for flag in flags}
    added = [f"{flag}={value}" for flag, value in defaults.items() if flag not in given]
    return [*flags, *added]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvtier serve",
        description="SGLang's server with kvtier's cache. Flags not listed here go to SGLang.",
        argument_default=None,
        allow_abbrev=False,
    )
    add_flags(parser)
    parser.add_argument(
        "--calibrate", action="store_true", help="calibrate the model first, unless that was done"
    )
    return parser


__all__ = ["launch", "main", "with_defaults"]
