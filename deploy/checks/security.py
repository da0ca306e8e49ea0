"""The restricted pod security standard of Kubernetes, and more: roots are read-only, and only who
talks to the Kubernetes API has a token for it.

https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deploy.checks.manifests import Container, Manifests, Workload

VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"}
VOLUMES |= {"projected", "secret"}
SECCOMP = ("RuntimeDefault", "Localhost")
ENFORCE = "pod-security.kubernetes.io/enforce"


def check(manifests: Manifests) -> list[str]:
    findings = []
    for workload in manifests.workloads:
        found = [*_pod(workload)]
        for container in workload.containers:
            found += [f"{container.name}: {one}" for one in _container(workload, container)]
        findings += [f"{workload.title}: {one}" for one in found]
    for namespace in manifests.of_kind("Namespace"):
        if namespace["metadata"].get("labels", {}).get(ENFORCE) != "restricted":
            findings.append(
                f"Namespace/{namespace['metadata']['name']}: does not enforce restricted"
            )
    return findings + _tokens(manifests)


def _pod(workload: Workload) -> Iterator[str]:
    pod = workload.pod
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            yield f"{name} is on"
    if pod.get("enableServiceLinks") is not False:
        yield "enableServiceLinks is not off: Services add variables that look like settings"
    for name, volume in workload.volumes.items():
        kinds = set(volume) - {"name", "claimTemplate"}
        if not kinds <= VOLUMES:
            yield f"volume {name} is of kind {', '.join(sorted(kinds))}"


def _container(workload: Workload, container: Container) -> Iterator[str]:
    own, pods = (
        container.document.get("securityContext", {}),
        workload.pod.get("securityContext", {}),
    )
    merged: dict[str, Any] = pods | own
    if merged.get("runAsNonRoot") is not True:
        yield "runAsNonRoot is not true"
    if not merged.get("runAsUser"):
        yield "runAsUser is root or not said"
    if merged.get("seccompProfile", {}).get("type") not in SECCOMP:
        yield "no seccomp profile"
    if own.get("privileged") or own.get("allowPrivilegeEscalation") is not False:
        yield "may gain privileges"
    capabilities = own.get("capabilities", {})
    if capabilities.get("drop") != ["ALL"]:
        yield "does not drop all capabilities"
    if set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield f"adds capabilities {capabilities['add']}"
    if own.get("readOnlyRootFilesystem") is not True:
        yield "has a writable root"
    if any("hostPort" in port for port in container.document.get("ports", [])):
        yield "takes a port of its node"


def _tokens(manifests: Manifests) -> list[str]:
    """Pods with a token are those whose account has a role."""
    bound = {
        subject["name"]
        for binding in manifests.of_kind("RoleBinding")
        for subject in binding.get("subjects", [])
    }
    findings = []
    for one in manifests.workloads:
        has = one.pod.get("automountServiceAccountToken") is not False
        if has != (one.pod.get("serviceAccountName") in bound):
            what = "has a token and no role" if has else "has a role and no token"
            findings.append(f"{one.title}: {what}")
    return findings
