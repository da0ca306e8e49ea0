"""Podman, asked through its command line, and a workload of Kubernetes as a Pod that it plays."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.checks.manifests import Workload
from kvtier.errors import KvtierError

TIMEOUT_S = 600


class PodmanError(KvtierError):
    """Podman is not there, or did not do what it was asked."""


class Podman:
    """program: the command; it needs the right to make containers, so usually root."""

    def __init__(self, program: str) -> None:
        self.program = program

    def __call__(self, *arguments: str, timeout_s: float = TIMEOUT_S) -> str:
        """Run podman and return what it printed. Raises PodmanError."""
        command = [self.program, *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PodmanError(f"{' '.join(command)}: {error}") from error
        if done.returncode:
            raise PodmanError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def has_image(self, name: str) -> bool:
        try:
            self("image", "exists", name)
        except PodmanError:
            return False
        return True

    def state(self, container: str) -> dict[str, Any]:
        """Return a container's state as `podman inspect` has it."""
        (found,) = json.loads(self("container", "inspect", container))
        state: dict[str, Any] = found["State"]
        return state


def as_pod(
    workload: Workload, image: str, folders: Mapping[str, Path], flags: Mapping[str, str]
) -> dict[str, Any]:
    """The Pod that a workload's template describes, as far as one machine without a cluster goes.

    Its security, flags, volumes and grace period stay. What differs:

    image:   of the one container, in place of the registry's
    folders: of this machine, by the volumes of Secrets and claims that they stand for
    flags:   which get other values, such as sizes
    network: the machine's own, because there is no Service
    """
    pod = copy.deepcopy(workload.pod)
    (container,) = pod["containers"]
    container["image"] = image
    container["imagePullPolicy"] = "Never"
    container["args"] = [_changed(word, flags) for word in container["args"]]
    pod["hostNetwork"] = True
    # Podman publishes no ports in the machine's network, and asks probes with a curl that the image
    # would have to have; they are asked from outside.
    for name in ("ports", "readinessProbe", "livenessProbe"):
        container.pop(name)
    # Accounts are a cluster's.
    pod.pop("serviceAccountName")
    kept = [one for one in pod.get("volumes", []) if one["name"] not in folders]
    pod["volumes"] = kept + [
        {"name": name, "hostPath": {"path": str(path), "type": "Directory"}}
        for name, path in folders.items()
    ]
    metadata = {"name": workload.document["metadata"]["name"], "labels": workload.labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}


def _changed(word: str, flags: Mapping[str, str]) -> str:
    name, equals, _ = word.partition("=")
    return f"{name}={flags[name]}" if equals and name in flags else word
