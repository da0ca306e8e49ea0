"""The production router, with its manifest's flags, finds real engines by the Pods of an emulated
Kubernetes API: those that are ready, as long as they are there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from live_server import free_port, serving, stop
from waiting import SAFETY_S, wait_for

from deploy.checks.manifests import Manifests
from deploy.checks.rendering import DEPLOY

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NAMESPACE, KEY, MODEL = "kvtier", "the-pod-uid", "kvtier-demo"
# Every Pod of a cluster has an address of its own, and all engines the same port.
ADDRESSES = {"engine-0": "127.0.0.2", "engine-1": "127.0.0.3"}
SESSIONS = 12


class Cluster:
    """The emulated API, asked as controllers ask it."""

    def __init__(self, port: int, labels: Mapping[str, str]) -> None:
        self.url, self.labels = f"http://127.0.0.1:{port}", dict(labels)
        self.pods = f"/api/v1/namespaces/{NAMESPACE}/pods"

    def ask(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=SAFETY_S) as answer:
            return json.load(answer)

    def answers(self) -> bool:
        try:
            return bool(self.ask("GET", "/version"))
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
        """What a client in the cluster would read from its service account."""
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
        data = None if body is None else json.dumps(body).encode()
        given = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}", **headers}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, given)
        try:
            with urllib.request.urlopen(request, timeout=SAFETY_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{error}: {error.read().decode()}") from error

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

    def all_answer(self) -> None:
        for session in range(SESSIONS):
            # Where engines are discovered, every request has to name its model.
            body = {"model": MODEL, "prompt": f"{session} is", "max_tokens": 2}
            found = self.ask("/v1/completions", body, {"x-session-id": f"session-{session}"})
            assert found["usage"]["completion_tokens"] == 2


@contextmanager
def process(command: Sequence[str], log: Path, **environment: str) -> Iterator[None]:
    with log.open("wb") as stream:
        made = subprocess.Popen(
            command, env=os.environ | environment, stdout=stream, stderr=stream,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield
    finally:
        stop(made)


@contextmanager
def engines(folder: Path, port: int) -> Iterator[None]:
    """One at each address."""
    model = DEPLOY.parent / "models" / MODEL
    with ExitStack() as all_of_them:
        for name, address in ADDRESSES.items():
            command = [
                sys.executable, "-m", "kvtier", "serve", "--model-path", str(model),
                "--device", "cpu", "--dtype", "float32", "--host", address, "--port", str(port),
                "--served-model-name", MODEL, "--max-total-tokens", "4096", "--skip-server-warmup",
                "--log-level", "warning",
            ]  # fmt: skip
            log = folder / f"{name}.log"
            all_of_them.enter_context(serving(command, port, log=log, host=address))
        yield


def test_engines_come_when_their_pods_are_ready_and_go_with_them(rendered):
    port, api = free_port(), free_port()
    router = Router(rendered["production"], port)
    cluster = Cluster(api, {"app.kubernetes.io/name": "kvtier-engine"})
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd")))
        emulator = [sys.executable, str(Path(__file__).with_name("emulated_cluster.py")), str(api)]
        stack.enter_context(process(emulator, folder / "api.log"))
        wait_for(cluster.answers)
        stack.enter_context(engines(folder, port))
        cluster.add("engine-0", ADDRESSES["engine-0"], ready=True, labels=cluster.labels)
        cluster.add("engine-1", ADDRESSES["engine-1"], ready=False, labels=cluster.labels)
        cluster.add("other", "127.0.0.4", ready=True, labels={"app.kubernetes.io/name": "other"})
        command = [str(Path(sys.executable).with_name(router.words[0])), *router.words[1:]]
        log, kubeconfig = folder / "router.log", cluster.configuration(folder / "kubeconfig")
        stack.enter_context(process(command, log, KUBECONFIG=str(kubeconfig)))
        try:
            router.knows("engine-0")
            router.all_answer()
            cluster.becomes_ready("engine-1")
            router.knows("engine-0", "engine-1")
            router.all_answer()
            cluster.delete("engine-0")
            router.knows("engine-1")
            router.all_answer()
        except BaseException:
            print(log.read_text()[-6000:], router.engines())
            raise
