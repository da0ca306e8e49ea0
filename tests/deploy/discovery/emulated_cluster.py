"""An emulated Kubernetes API (kmock) that knows Pods and nothing else, as a process of its own.

    python tests/deploy/discovery/emulated_cluster.py PORT

Pods are made, changed and deleted through the API itself, as a cluster's controllers do it.
"""

from __future__ import annotations

import asyncio
import sys

import kmock


async def serve(port: int) -> None:
    async with kmock.KubernetesEmulator() as cluster, kmock.Server(cluster, port=port):
        cluster.resources["v1/pods"] = {
            "namespaced": True, "kind": "Pod", "singular": "pod", "shortnames": [],
            "verbs": ["create", "delete", "get", "list", "patch", "watch"], "categories": [],
            "subresources": [],
        }  # fmt: skip
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
