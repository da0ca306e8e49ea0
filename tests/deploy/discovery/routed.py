"""A production router that finds engines by the Pods of an emulated Kubernetes API."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from live_server import ask, free_port, running
from waiting import wait_for

from deploy.checks.manifests import Manifests

NAMESPACE, KEY, MODEL = "kvtier", "the-pod-uid", "kvtier-demo"
# Every Pod of a cluster has an address of its own, and all engines the same port.
ADDRESSES = {"engine-0": "127.0.0.2", "engine-1": "127.0.0.3"}


class Cluster:
    """The emulated API, asked as controllers ask it."""

    def __init__(self, port: int, labels: Mapping[str, str]) -> None:
        self.url, self.labels = f"http://127.0.0.1:{port}", dict(labels)
        self.pods = f"/api/v1/namespaces/{NAMESPACE}/pods"

    def ask(self, method: str, path: str, body: object = None) -> None:
        status, text = ask(f"{self.url}{path}", body, method=method)
        assert status < 300, text

    def answers(self) -> bool:
        try:
            return ask(f"{self.url}/version")[0] == 200
        except OSError:
            return False

    def add(self, name: str, address: str, *, ready: bool, labels: Mapping[str, str]) -> None:
        metadata = {"name": name, "namespace": NAMESPACE, "uid": name, "labels": dict(labels)}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": []}}
        self.ask("POST", self.pods, pod | {"status": status(address, ready=ready)})

    def becomes_ready(self, name: str) -> None:
        found = status(ADDRESSES[name], ready=True)
        self.ask("PATCH", f"{self.pods}/{name}", {"status": found})

    def delete(self, name: str) -> None:
        self.ask("DELETE", f"{self.pods}/{name}")

    def configuration(self, file: Path) -> Path:
        """Write what a client in the cluster would read from its service account."""
        known = {"server": self.url}
        context = {"cluster": "emulated", "user": "nobody", "namespace": NAMESPACE}
        file.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "emulated", "cluster": known}],
                    "users": [{"name": "nobody", "user": {}}],
                    "contexts": [{"name": "emulated", "context": context}],
                    "current-context": "emulated",
                }
            )
        )
        return file


def status(address: str, *, ready: bool) -> dict[str, Any]:
    condition = {"type": "Ready", "status": str(ready)}
    return {"phase": "Running", "podIP": address, "conditions": [condition]}


class Router:
    """smg as the production overlay starts it; ports, and what a cluster alone knows, are moved."""

    def __init__(self, manifests: Manifests, engines: int) -> None:
        (self.workload,) = (
            one for one in manifests.workloads if one.title == "Deployment/kvtier-router"
        )
        (container,) = self.workload.containers
        self.port = free_port()
        moved = {
            "0.0.0.0": "127.0.0.1", "=8080": f"={self.port}", "=29000": f"={free_port()}",
            "=30000": f"={engines}", "<fieldRef>": KEY,
        }  # fmt: skip
        self.words = []
        for word in manifests.expanded(container):
            if word.startswith("--service-discovery-namespace="):
                word = f"--service-discovery-namespace={NAMESPACE}"
            for theirs, ours in moved.items():
                word = word.replace(theirs, ours)
            self.words.append(word)

    def ask(self, path: str, body: object = None, headers: Mapping[str, str] = {}) -> Any:
        given = {"Authorization": f"Bearer {KEY}", **headers}
        status, text = ask(f"http://127.0.0.1:{self.port}{path}", body, given)
        assert status < 300, text
        return json.loads(text)

    def engines(self) -> set[str]:
        """Addresses of those that it knows and that are well."""
        try:
            workers = self.ask("/workers")["workers"]
        except OSError:
            return set()
        well = (one["url"] for one in workers if one["is_healthy"])
        return {url.removeprefix("http://").partition(":")[0] for url in well}

    def knows(self, *names: str) -> None:
        """Wait until it knows these, and no others."""
        wanted = {ADDRESSES[name] for name in names}
        wait_for(lambda: self.engines() == wanted)


@contextmanager
def emulated_cluster(folder: Path) -> Iterator[Cluster]:
    """Start an emulated cluster of engines, which answers."""
    port = free_port()
    cluster = Cluster(port, {"app.kubernetes.io/name": "kvtier-engine"})
    emulator = [sys.executable, str(Path(__file__).with_name("emulated_cluster.py")), str(port)]
    with running(emulator, folder / "api.log"):
        wait_for(cluster.answers)
        yield cluster


@contextmanager
def routing(router: Router, cluster: Cluster, folder: Path) -> Iterator[Path]:
    """The router runs; its log."""
    command = [str(Path(sys.executable).with_name(router.words[0])), *router.words[1:]]
    log = folder / f"router-{router.port}.log"
    kubeconfig = cluster.configuration(folder / "kubeconfig")
    with running(command, log, env=os.environ | {"KUBECONFIG": str(kubeconfig)}):
        yield log
