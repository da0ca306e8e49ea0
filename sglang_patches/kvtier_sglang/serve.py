"""`kvtier serve`: SGLang's own server with kvtier's cache and attention.

kvtier's flags are the settings of kvtier.config (--head-profile, --tier, ...); every other flag
goes to SGLang unchanged.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from kvtier.calibration.defaults import fitted_worth
from kvtier.config import Settings, load_settings
from kvtier.config.loading import add_flags
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
    from sglang.srt.utils import kill_process_tree

    from kvtier_sglang import compat

    server_args = server_args_of(sglang_flags)
    if server_args.tokenizer_worker_num == 1:
        _mount(status=compat.uses_kvtier(server_args))
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def server_args_of(flags: Sequence[str]) -> Any:
    """Return SGLang's ServerArgs of its flags, with kvtier's plugin in force. Raises KvtierError
    for what does not go together with it."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    from kvtier_sglang import compat, plugin

    load_plugins()
    plugin.verify()
    server_args = prepare_server_args(list(flags))
    compat.check_server_args(server_args, compat.settings_of(server_args))
    return server_args


class RefusedAtTheEnd:
    """ASGI middleware: a server whose schedulers have ended after SIGTERM answers 503.

    SGLang ends them as soon as no request is left, and stops listening later. What a router sends
    meanwhile, over a connection that it keeps, would wait for them, and the server for that, until
    it is killed. manager: called whenever it is asked, as it is there only once the server runs.
    """

    def __init__(self, app: Any, manager: Callable[[], Any]) -> None:
        self._app, self._manager = app, manager

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from fastapi.responses import PlainTextResponse

        app = self._app
        if scope["type"] == "http" and self._has_ended:
            app = PlainTextResponse("the server has ended", HTTPStatus.SERVICE_UNAVAILABLE)
        await app(scope, receive, send)

    @property
    def _has_ended(self) -> bool:
        from sglang.srt.utils.cudacore_pyspy_dump_utils import collect_scheduler_processes

        return self._manager().gracefully_exit and not collect_scheduler_processes()


def _mount(*, status: bool) -> None:
    """Add to SGLang's HTTP server, where that is one process: several import it anew, and look at
    no keys. status: the status page, too."""
    from sglang.srt.entrypoints import http_server

    from kvtier_sglang.status.routes import mount

    def manager() -> Any:
        return http_server.get_global_state().tokenizer_manager

    http_server.app.add_middleware(RefusedAtTheEnd, manager=manager)
    if status:
        mount(http_server.app, manager)


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
