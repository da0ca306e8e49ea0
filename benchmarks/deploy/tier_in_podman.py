"""The tier as deploy/overlays/production deploys it, in a real container: is it confined, scraped,
drained at SIGTERM, and does it have everything that it acknowledged when it is started again?

    podman build -f deploy/image/tier/Dockerfile -t localhost/kvtier-tier:0.2.0 .
    python -m benchmarks.deploy.tier_in_podman

The StatefulSet is rendered by kustomize and played by podman: uid, capabilities, seccomp, read-only
root, flags and grace period are the manifest's. Sizes are smaller, the Secret's and the claim's
volumes are folders, and there is no Service (benchmarks/deploy/podman.py). Clients come over mutual
TLS. The container gets SIGTERM while one of them puts blob after blob and another is in the middle
of a put; what a put returned for is acknowledged, and read back from the next container over the
same folder. It wants root, who may give folders to the Pod's user.

Without a registry a base can be made of Debian's packages, and be named by --build-arg BASE:

    mmdebstrap --variant=minbase --include=ca-certificates,python3-venv bookworm - \\
        | podman import - localhost/debian-python
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common.bars import Bar
from benchmarks.common.benchmark import RESULTS, Arguments, Benchmark, Measured, Options
from benchmarks.deploy.podman import Podman, PodmanError, as_pod
from benchmarks.deploy.tier_clients import (
    HalfPut,
    Writer,
    asked,
    client,
    missing_and_corrupt,
    refusals,
    scrape,
)
from benchmarks.tier.transport.paths import Bytes
from benchmarks.tier.transport.processes import HOST, make_certificates
from deploy.checks.manifests import Workload
from deploy.checks.rendering import copy_tree, render
from kvtier import __version__
from kvtier.tier.client import TlsFiles

IMAGE = f"localhost/kvtier-tier:{__version__}"
OVERLAY = Path("overlays") / "production"
# The user of the manifest's container; the folders of its volumes are given to that user.
USER = 10001
# A quarter of the memory holds all that is put: what waits for the disk beyond that stays in memory
# only, and would be lost by design.
SMALLER = {"--memory": "1g", "--disk": "2g", "--transfer-memory": "64m", "--max-blob": "16m"}
METRICS = ("kvtier_tier_blobs", "kvtier_tier_used_bytes", "kvtier_tier_shed_total")
POD, CONTAINER = "kvtier-tier", "kvtier-tier-tier"
START_S, LOOK_S = 60.0, 0.01


@dataclass
class Seen:
    """The events that the tier went through. acknowledged: positions of blobs whose put
    returned."""

    confined: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, bool] = field(default_factory=dict)
    scraped: dict[str, float] = field(default_factory=dict)
    acknowledged: list[int] = field(default_factory=list)
    acknowledged_while_draining: bool = False
    exit_code: int | None = None
    ended_s: float = 0.0
    started_again_s: float = 0.0
    lost: int = 0
    corrupt: int = 0


def declare(arguments: Arguments) -> None:
    arguments.add("--podman", default="podman", metavar="PROGRAM", help="(%(default)s)")
    arguments.size("--blob", "1m", "of each blob")
    arguments.whole("--blobs", 60, "put before SIGTERM; as many more while it comes", least=8)


def run(options: Options) -> Measured:
    podman = Podman(options.podman)
    if not podman.has_image(IMAGE):
        raise PodmanError(f"no image {IMAGE}; see the head of this benchmark's file")
    with tempfile.TemporaryDirectory(prefix="kvtier-podman-") as name:
        seen = measure(podman, options, Path(name))
    figures = {"podman": podman("--version").strip(), "smaller": SMALLER, **vars(seen)}
    figures["acknowledged"] = len(seen.acknowledged)
    return Measured(figures, make_bars(seen, options.blobs))


def tier(folder: Path) -> Workload:
    """The rendered StatefulSet."""
    found = render(copy_tree(folder) / OVERLAY).find("StatefulSet", POD)
    assert found is not None
    return Workload(found)


def measure(podman: Podman, options: Options, folder: Path) -> Seen:
    workload, seen = tier(folder), Seen()
    places = {name: folder / name for name in ("certificates", "store")}
    tls = prepare(places)
    manifest = folder / "pod.yaml"
    manifest.write_text(yaml.safe_dump(as_pod(workload, IMAGE, places, SMALLER)))
    data = Bytes(options.blob, 2 * options.blobs, options.seed)
    (container,) = workload.containers
    address, web = f"{HOST}:{container.ports['grpc']}", container.ports["metrics"]
    with playing(podman, manifest, web):
        seen.confined = confinement(podman)
        seen.refused = refusals(address, tls)
        with client(address, tls) as one:
            for position in range(options.blobs):
                one.put(data.blobs[position])
                seen.acknowledged.append(position)
        seen.scraped = scrape(web, METRICS)
        grace_s = workload.pod["terminationGracePeriodSeconds"]
        drain(podman, data, seen, (address, tls, web), grace_s)
    began = time.perf_counter()
    with playing(podman, manifest, web):
        seen.started_again_s = time.perf_counter() - began
        seen.lost, seen.corrupt = missing_and_corrupt(address, tls, data, seen.acknowledged)
    return seen


def prepare(places: dict[str, Path]) -> TlsFiles:
    """Folders as a cluster would mount them: of the Pod's user, with a Secret's file names."""
    for path in places.values():
        path.mkdir()
    flags, tls = make_certificates(places["certificates"], "kvtier-engine")
    for given, name in zip(flags[1::2], ("tls.crt", "tls.key", "ca.crt"), strict=True):
        Path(given).rename(places["certificates"] / name)
    try:
        for path in [*places.values(), *places["certificates"].iterdir()]:
            os.chown(path, USER, USER)
    except PermissionError as error:
        raise PodmanError(f"only root can give folders to user {USER}: {error}") from error
    # The folder around them is this user's alone.
    places["store"].parent.chmod(0o711)
    return tls


@contextmanager
def playing(podman: Podman, manifest: Path, web: int) -> Iterator[None]:
    """The Pod, from when it is ready."""
    podman("play", "kube", str(manifest))
    try:
        wait_for(lambda: asked(web, "/readyz") == 200, podman)
        yield
    finally:
        podman("pod", "rm", "--force", POD)


def wait_for(met: Callable[[], bool], podman: Podman) -> None:
    deadline = time.monotonic() + START_S
    while not met():
        if time.monotonic() > deadline:
            raise PodmanError(f"not so after {START_S:g} s:\n{podman('logs', CONTAINER)}")
        time.sleep(LOOK_S)


def confinement(podman: Podman) -> dict[str, Any]:
    """Return what the kernel says of the service's process, and what its root says to a writer."""
    pid = podman("container", "inspect", "--format", "{{.State.Pid}}", CONTAINER).strip()
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines)
    try:
        podman("exec", CONTAINER, "touch", "/written")
        writable = True
    except PodmanError as error:
        writable = "Read-only file system" not in str(error)
    return {
        "uids": sorted(set(status["Uid"].split())),
        "capabilities": status["CapEff"].strip(),
        "capability_bounds": status["CapBnd"].strip(),
        "seccomp_mode": int(status["Seccomp"]),
        "no_new_privileges": int(status["NoNewPrivs"]),
        "root_is_writable": writable,
    }


def drain(
    podman: Podman, data: Bytes, seen: Seen, where: tuple[str, TlsFiles, int], grace_s: int
) -> None:
    """SIGTERM, with puts under way."""
    address, tls, web = where
    half = HalfPut(address, tls, data, data.count - 1)
    writer = Writer(address, tls, data, range(len(seen.acknowledged), data.count - 1))
    writer.start()
    wait_for(lambda: bool(writer.acknowledged), podman)
    began = time.perf_counter()
    command = [podman.program, "pod", "stop", "--time", str(grace_s), POD]
    stopping = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: asked(web, "/readyz") == 503, podman)
    seen.acknowledged_while_draining = half.go_on()
    stopping.wait()
    seen.ended_s = time.perf_counter() - began
    writer.join()
    seen.exit_code = podman.state(CONTAINER)["ExitCode"]
    seen.acknowledged += writer.acknowledged
    seen.acknowledged += [half.position] * seen.acknowledged_while_draining


def make_bars(seen: Seen, blobs: int) -> list[Bar]:
    confined, scraped = seen.confined, seen.scraped
    no_capabilities = {confined["capabilities"], confined["capability_bounds"]} == {"0" * 16}
    held, half = scraped["kvtier_tier_blobs"] == blobs, seen.acknowledged_while_draining
    return [
        Bar("an ordinary user", confined["uids"], confined["uids"] == [str(USER)]),
        Bar("no capabilities", confined["capabilities"], no_capabilities),
        Bar("a seccomp filter", confined["seccomp_mode"], confined["seccomp_mode"] == 2),
        Bar("no new privileges", confined["no_new_privileges"], confined["no_new_privileges"] == 1),
        Bar("read-only root", confined["root_is_writable"], not confined["root_is_writable"]),
        Bar("strangers refused", seen.refused, all(seen.refused.values())),
        Bar("scraped", scraped, held, "as many blobs as were put"),
        Bar("a put under way at SIGTERM is acknowledged", half, half),
        Bar("drained", seen.exit_code, seen.exit_code == 0, "exit code 0"),
        Bar("acknowledged and lost", seen.lost, seen.lost == 0, "0"),
        Bar("acknowledged and corrupt", seen.corrupt, seen.corrupt == 0, "0"),
    ]


BENCHMARK = Benchmark(
    "deploy.tier_in_podman", __doc__, declare, run, out=RESULTS / "tier-in-podman.json"
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
