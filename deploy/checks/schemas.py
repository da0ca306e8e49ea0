"""Every document against the schema of its kind: no unknown field, no wrong type.

Kubernetes' own kinds by their published JSON schemas, strictly. Custom kinds by models made from
their operators' definitions; those let unknown fields pass, so what a model gives back is compared
with what it was given.
"""

from __future__ import annotations

import importlib
from typing import Any

import kubernetes_validate
from pydantic import ValidationError

from deploy.checks.manifests import Document, Manifests, title

KUBERNETES = "1.37"
MODELS = {
    "cert-manager.io/v1": "cloudcoil.models.cert_manager.v1",
    "keda.sh/v1alpha1": "cloudcoil.models.keda.v1alpha1",
    "monitoring.coreos.com/v1": "cloudcoil.models.prometheus_operator.v1",
}


def check(manifests: Manifests) -> list[str]:
    return [
        f"{title(one)}: {finding}"
        for one in manifests.documents
        for finding in (_custom if one["apiVersion"] in MODELS else _built_in)(one)
    ]


def _built_in(document: Document) -> list[str]:
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        return [f"no schema of {document['apiVersion']} {document['kind']} is known"]
    except kubernetes_validate.ValidationError as error:
        where = ".".join(str(part) for part in error.absolute_path)
        return [f"{where}: {error.message}"]
    return []


def _custom(document: Document) -> list[str]:
    model = getattr(importlib.import_module(MODELS[document["apiVersion"]]), document["kind"], None)
    if model is None:
        return [f"no schema of {document['apiVersion']} {document['kind']} is known"]
    try:
        back = model.model_validate(document).model_dump(mode="json", by_alias=True)
    except ValidationError as error:
        return [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
    return [f"{path}: unknown" for path in _lost(document, back)]


def _lost(given: Any, back: Any, path: str = "") -> list[str]:
    """Return the paths where something was given that did not come back."""
    if isinstance(given, dict):
        held = back if isinstance(back, dict) else {}
        return [
            finding
            for key, value in given.items()
            for finding in (
                _lost(value, held[key], f"{path}.{key}" if path else key)
                if held.get(key) is not None
                else [f"{path}.{key}" if path else key]
            )
        ]
    if isinstance(given, list):
        pairs = zip(given, back, strict=True)
        return [one for i, (a, b) in enumerate(pairs) for one in _lost(a, b, f"{path}.{i}")]
    return []
