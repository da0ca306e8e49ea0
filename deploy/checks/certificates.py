"""Secrets that are mounted are made, for the names that clients call and are known by."""

from __future__ import annotations

import re
from collections.abc import Iterator

from deploy.checks.manifests import Container, Manifests, Workload, is_below

# Settings that name a server which is spoken to over TLS, and the flag that names its certificate.
URLS = {"KVTIER_TIER": "KVTIER_TIER_CA", "KVTIER_REDIS_URL": "KVTIER_REDIS_CA"}


def check(manifests: Manifests) -> list[str]:
    return [
        *(one for workload in manifests.workloads for one in _secrets(manifests, workload)),
        *(one for pair in manifests.containers() for one in _names(manifests, *pair)),
        *_namespaces(manifests),
        *_authorities(manifests),
    ]


def _made(manifests: Manifests) -> dict[str, dict[str, object]]:
    """Specs of Certificates by their Secrets."""
    return {one["spec"]["secretName"]: one["spec"] for one in manifests.of_kind("Certificate")}


def _secrets(manifests: Manifests, workload: Workload) -> Iterator[str]:
    for name, volume in workload.volumes.items():
        secret = volume.get("secret")
        if secret is None or secret.get("optional"):
            continue
        wanted = secret["secretName"]
        if wanted not in _made(manifests):
            yield f"{workload.title}: volume {name}: nothing makes the Secret {wanted}"
        if not workload.pod.get("securityContext", {}).get("fsGroup"):
            yield f"{workload.title}: volume {name}: without fsGroup its key cannot be read"


def _names(manifests: Manifests, workload: Workload, container: Container) -> Iterator[str]:
    """Every server that is called over TLS has a certificate for the name it is called by."""
    environment = manifests.environment(container)
    for setting, authority in URLS.items():
        if authority not in environment:
            continue
        host = re.sub(r"^\w+://|:\d+(/\d+)?$", "", environment.get(setting, ""))
        service = manifests.find("Service", host.split(".")[0])
        if service is None:
            yield f"{workload.title}: {setting}: no Service {host}"
            continue
        for server in manifests.selected({"matchLabels": service["spec"]["selector"]}):
            for spec in _certificates(manifests, server):
                if host not in spec.get("dnsNames", []):  # type: ignore[operator]
                    yield f"{workload.title}: {setting}: the certificate there is not for {host}"


def _certificates(manifests: Manifests, workload: Workload) -> list[dict[str, object]]:
    made, volumes = _made(manifests), workload.volumes.values()
    names = [one["secret"]["secretName"] for one in volumes if "secret" in one]
    return [made[name] for name in names if name in made]


def _namespaces(manifests: Manifests) -> Iterator[str]:
    """A client's namespace in a tier is its certificate's common name, and the tier serves it."""
    served = [
        word.partition("=")[2].partition("=")[0]
        for _, container in manifests.containers()
        for word in container.words
        if word.startswith("--namespace=")
    ]
    for workload, container in manifests.containers():
        environment = manifests.environment(container)
        if "KVTIER_TIER_CERTIFICATE" not in environment:
            continue
        namespace = environment.get("KVTIER_TIER_NAMESPACE", "default")
        if served and namespace not in served:
            yield f"{workload.title}: no tier serves the namespace {namespace}"
        names = [
            spec.get("commonName")
            for spec in _certificates(manifests, workload)
            if _mounted_for(workload, container, environment["KVTIER_TIER_CERTIFICATE"])
        ]
        if namespace not in names:
            yield f"{workload.title}: its certificate is of {names}, its namespace is {namespace}"


def _mounted_for(workload: Workload, container: Container, path: str) -> bool:
    return any(
        is_below(path, mount["mountPath"]) and "secret" in workload.volumes.get(mount["name"], {})
        for mount in container.document.get("volumeMounts", [])
    )


def _authorities(manifests: Manifests) -> Iterator[str]:
    """Issuers that certificates ask for, and Secrets of authorities that issuers sign with."""
    for one in manifests.of_kind("Certificate"):
        name = one["spec"]["issuerRef"]["name"]
        if manifests.find("Issuer", name) is None:
            yield f"Certificate/{one['metadata']['name']}: no Issuer {name}"
    for one in manifests.of_kind("Issuer"):
        secret = one["spec"].get("ca", {}).get("secretName")
        if secret is not None and not _made(manifests).get(secret, {}).get("isCA"):
            yield f"Issuer/{one['metadata']['name']}: no authority in the Secret {secret}"
