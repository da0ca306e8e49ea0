"""A Pod's grace period is longer than what happens in it, and a tier's memory limit holds what the
tier takes."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.checks.manifests import Container, Manifests, Workload
from kvtier.config import Settings
from kvtier.sizes import parse_size
from kvtier_tierd.options import MIB, TierOptions
from kvtier_tierd.stores.layered import BEHIND_SHARE
from kvtier_tierd.stores.memory import MemoryOptions

# SGLang looks after a SIGTERM this often, and gives its scheduler so long to end.
SGLANG_LOOKS_S, SGLANG_ENDS_S = 5, 15
# For one long answer at the least; they are not bounded otherwise.
ANSWER_S = 300
# The bytes a second of a slow disk, for what waits for it when a tier ends.
DISK_BYTES_PER_S = 100e6
# The memory that Python and gRPC take beside what is asked for.
PROCESS_BYTES = 256 * MIB
ROUTER_GRACE_S = 180
KUBERNETES_GRACE_S = 30


def check(manifests: Manifests) -> list[str]:
    findings = []
    for workload, container in manifests.containers():
        where = f"{workload.title}: {container.name}"
        findings += [f"{where}: {one}" for one in _grace(manifests, workload, container)]
        if container.words[:2] == ["kvtier", "tier"]:
            findings += [f"{where}: {one}" for one in _memory(workload, container)]
        if container.stays and "memory" not in container.document.get("resources", {}).get(
            "limits", {}
        ):
            findings.append(f"{where}: no memory limit")
    return findings


def _grace(manifests: Manifests, workload: Workload, container: Container) -> Iterator[str]:
    if not container.stays or workload.document["kind"] == "Job":
        return
    grace_s = workload.pod.get("terminationGracePeriodSeconds", KUBERNETES_GRACE_S)
    hook = container.document.get("lifecycle", {}).get("preStop", {})
    needed_s = hook.get("sleep", {}).get("seconds", 0) + _ending_s(manifests, container)
    if grace_s <= needed_s:
        yield f"ends within {needed_s:.0f} s, and the Pod is killed after {grace_s} s"


def _ending_s(manifests: Manifests, container: Container) -> float:
    """Return the seconds that the program may take from SIGTERM on."""
    match container.words[:2]:
        case ["kvtier", "serve"]:
            given = manifests.environment(container).get("KVTIER_TIER_DRAIN_S")
            drain_s = float(given or Settings().tier.drain_s)
            return SGLANG_LOOKS_S + ANSWER_S + max(drain_s, SGLANG_ENDS_S)
        case ["kvtier", "tier"]:
            drain_s = float(container.flag("drain-s") or TierOptions().drain_s)
            return drain_s + _behind_bytes(container) / DISK_BYTES_PER_S
        case ["smg", "launch"]:
            return float(container.flag("shutdown-grace-period-secs") or ROUTER_GRACE_S)
    return 0.0


def _behind_bytes(container: Container) -> float:
    """The part of what memory holds that may wait for the disk."""
    return BEHIND_SHARE * _store_bytes(container) if container.flag("disk-path") else 0.0


def _size(container: Container, flag: str, default: int) -> int:
    given = container.flag(flag)
    return default if given is None else parse_size(given, f"--{flag}")


def _store_bytes(container: Container) -> int:
    """The memory that the store takes when it starts."""
    store = container.flag("store") or MemoryOptions.kind
    if store == "mooncake":
        return _size(container, "mooncake-segment", 4 << 30) + _size(
            container, "mooncake-buffer", 2 << 30
        )
    return _size(container, "memory", MemoryOptions().memory_bytes) if "memory" in store else 0


def _memory(workload: Workload, container: Container) -> Iterator[str]:
    resources = container.document.get("resources", {})
    limit, request = (resources.get(kind, {}).get("memory") for kind in ("limits", "requests"))
    if limit is None:
        return
    if limit != request:
        yield f"its memory request {request} is not its limit {limit}"
    store = _store_bytes(container)
    transfer = _size(container, "transfer-memory", TierOptions().transfer_bytes)
    needed = store + transfer + PROCESS_BYTES
    if _quantity(limit) < needed:
        yield f"may take {needed} bytes, and its limit is {limit}"
    if container.flag("shared-memory") != "off":
        yield from _shared(workload, container, store)


def _shared(workload: Workload, container: Container, store: int) -> Iterator[str]:
    """The memory of a store that clients map lies in /dev/shm."""
    mounts = container.document.get("volumeMounts", [])
    name = next((one["name"] for one in mounts if one["mountPath"] == "/dev/shm"), None)
    room = workload.volumes.get(name or "", {}).get("emptyDir", {}).get("sizeLimit", "64Mi")
    if _quantity(room) < store:
        yield f"its store takes {store} bytes of /dev/shm, which has {room}"


def _quantity(text: str) -> int:
    """Bytes of a quantity such as 52Gi. Raises UsageError."""
    return parse_size(text.removesuffix("i"), "a memory quantity")
