"""Every program accepts its flags, and kvtier its settings, by the parsers that they start with."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

from deploy.checks.manifests import Container, Manifests, Workload, is_below
from kvtier.errors import KvtierError

# Programs with no parser that could be asked here; the test of deploy/base/redis starts a server.
UNASKED = ("sh", "valkey-server", "mooncake_master")
# The files that cert-manager puts into a Secret.
SECRET_FILES = ("tls.crt", "tls.key", "ca.crt")


def check(manifests: Manifests) -> list[str]:
    findings = []
    for workload, container in manifests.containers():
        with _files(workload, container) as placed:
            words = [placed(word) for word in manifests.expanded(container)]
            settings = {k: placed(v) for k, v in manifests.environment(container).items()}
            told = _asked(words, settings)
        findings += [f"{workload.title}: {container.name}: {one}" for one in told]
    return findings


def _asked(words: Sequence[str], settings: dict[str, str]) -> list[str]:
    if words and words[0] in UNASKED:
        return []
    parse = PARSERS.get((*words[:2],))
    if parse is None:
        return [f"no parser of {' '.join(words[:2]) or 'nothing'} is known"]
    said = io.StringIO()
    # The container's variables, and no KVTIER_* of whoever checks.
    ours = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    try:
        with (
            mock.patch.dict(os.environ, ours | settings, clear=True),
            contextlib.redirect_stderr(said),
        ):
            parse(list(words[2:]))
    except SystemExit:
        return [said.getvalue().strip().splitlines()[-1]]
    except (KvtierError, ValueError) as error:
        return [str(error)]
    return []


@contextlib.contextmanager
def _files(workload: Workload, container: Container) -> Iterator[Callable[[str], str]]:
    """Stand-ins for the files of Secrets, which parsers look for; gives what moves a path there."""
    with tempfile.TemporaryDirectory(prefix="kvtier-checks-") as folder:
        mounted = [
            mount["mountPath"]
            for mount in container.document.get("volumeMounts", [])
            if "secret" in workload.volumes.get(mount["name"], {})
        ]
        for path in mounted:
            for name in SECRET_FILES:
                file = Path(folder) / path.lstrip("/") / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch()

        def placed(text: str) -> str:
            flag, equals, value = text.rpartition("=")
            if value.startswith("/") and any(is_below(value, path) for path in mounted):
                return f"{flag}{equals}{folder}{value}"
            return text

        yield placed


def _serve(flags: list[str]) -> None:
    from sglang.srt.server_args import ServerArgs

    from kvtier.config import load_settings
    from kvtier.config.loading import add_flags

    ours = argparse.ArgumentParser(prog="kvtier serve", allow_abbrev=False)
    add_flags(ours)
    options, others = ours.parse_known_args(flags)
    load_settings(**vars(options))
    theirs = argparse.ArgumentParser(prog="kvtier serve", allow_abbrev=False)
    ServerArgs.add_cli_args(theirs)
    theirs.parse_args(others)


def _tier(flags: list[str]) -> None:
    from kvtier_tierd.cli import parse

    parse(flags)


def _calibrate(flags: list[str]) -> None:
    from kvtier.calibration.cli import add_calibrate_parser
    from kvtier.config import load_settings

    parser = argparse.ArgumentParser(prog="kvtier")
    add_calibrate_parser(parser.add_subparsers())
    parser.parse_args(["calibrate", *flags])
    load_settings()


def _launch(flags: list[str]) -> None:
    from smg.launch_router import parse_router_args

    parse_router_args(flags)


PARSERS: dict[tuple[str, ...], Callable[[list[str]], None]] = {
    ("kvtier", "serve"): _serve,
    ("kvtier", "tier"): _tier,
    ("kvtier", "calibrate"): _calibrate,
    ("smg", "launch"): _launch,
}
