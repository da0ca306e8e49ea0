"""Mistakes in single objects and in what they name, and which check finds each."""

from __future__ import annotations

from mistakes import (
    ENGINE,
    REDIS,
    ROUTER,
    TIER,
    Mistake,
    container,
    set_flag,
    spec,
    without,
    workload,
)

OF_OBJECTS = {
    # schemas
    "a misspelt field": Mistake(
        "schemas",
        "terminationGracePeriod",
        lambda m: workload(m, TIER).pod.update(terminationGracePeriod=5),
    ),
    "a number where text is wanted": Mistake(
        "schemas", "env", lambda m: container(m, ENGINE)["env"][0].update(value=0.95)
    ),
    "an unknown kind": Mistake(
        "schemas", "no schema of v1 Pot", lambda m: m.documents[0].update(kind="Pot")
    ),
    "a misspelt field of cert-manager": Mistake(
        "schemas",
        "renewalBefore: unknown",
        lambda m: spec(m, "Certificate", TIER).update(renewalBefore="1h"),
    ),
    "a misspelt field of KEDA": Mistake(
        "schemas",
        "maxReplicas: unknown",
        lambda m: spec(m, "ScaledObject", ENGINE).update(maxReplicas=9),
        "watched",
    ),
    "a misspelt field of the Prometheus operator": Mistake(
        "schemas",
        "podMetricsEndpoints.0.prot: unknown",
        lambda m: spec(m, "PodMonitor", TIER)["podMetricsEndpoints"][0].update(prot="metrics"),
        "watched",
    ),
    # security
    "root": Mistake(
        "security",
        "runAsUser is root",
        lambda m: workload(m, TIER).pod["securityContext"].update(runAsUser=0),
    ),
    "a Pod that may be root": Mistake(
        "security",
        "runAsNonRoot is not true",
        lambda m: workload(m, ROUTER).pod["securityContext"].pop("runAsNonRoot"),
    ),
    "no seccomp profile": Mistake(
        "security",
        "no seccomp profile",
        lambda m: workload(m, REDIS).pod["securityContext"].pop("seccompProfile"),
    ),
    "capabilities": Mistake(
        "security",
        "does not drop all",
        lambda m: container(m, TIER)["securityContext"].pop("capabilities"),
    ),
    "an added capability": Mistake(
        "security",
        "adds capabilities",
        lambda m: container(m, TIER)["securityContext"]["capabilities"].update(add=["SYS_ADMIN"]),
    ),
    "privileges to gain": Mistake(
        "security",
        "may gain privileges",
        lambda m: container(m, ENGINE)["securityContext"].pop("allowPrivilegeEscalation"),
    ),
    "a writable root": Mistake(
        "security",
        "writable root",
        lambda m: container(m, ENGINE)["securityContext"].update(readOnlyRootFilesystem=False),
    ),
    "an init container that is root": Mistake(
        "security",
        "await-model: runAsUser is root",
        lambda m: (
            workload(m, ENGINE).pod["initContainers"][0]["securityContext"].update(runAsUser=0)
        ),
    ),
    "a folder of the node": Mistake(
        "security",
        "of kind hostPath",
        lambda m: workload(m, TIER).pod["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
    ),
    "the node's network": Mistake(
        "security", "hostNetwork is on", lambda m: workload(m, ROUTER).pod.update(hostNetwork=True)
    ),
    "a port of the node": Mistake(
        "security",
        "port of its node",
        lambda m: container(m, ENGINE)["ports"][0].update(hostPort=30000),
    ),
    "a token that nothing needs": Mistake(
        "security",
        "a token and no role",
        lambda m: workload(m, TIER).pod.pop("automountServiceAccountToken"),
    ),
    "Services in the environment": Mistake(
        "security",
        "enableServiceLinks",
        lambda m: workload(m, ENGINE).pod.pop("enableServiceLinks"),
    ),
    "a namespace without the standard": Mistake(
        "security",
        "does not enforce restricted",
        lambda m: m.find("Namespace", "kvtier")["metadata"].pop("labels"),
    ),
    # references
    "a Service without Pods": Mistake(
        "references",
        "Service/kvtier-tier: its selector",
        lambda m: spec(m, "Service", TIER)["selector"].update(app="other"),
    ),
    "a Service's port that no Pod has": Mistake(
        "references",
        "has no port https",
        lambda m: spec(m, "Service", ENGINE)["ports"][0].update(targetPort="https"),
    ),
    "a Deployment that does not find its Pods": Mistake(
        "references",
        "does not find its own Pods",
        lambda m: spec(m, "Deployment", ROUTER)["selector"]["matchLabels"].update(a="b"),
    ),
    "a PodDisruptionBudget without Pods": Mistake(
        "references",
        "PodDisruptionBudget/kvtier-router",
        lambda m: spec(m, "PodDisruptionBudget", ROUTER)["selector"]["matchLabels"].update(a="b"),
    ),
    "a policy for nobody": Mistake(
        "references",
        "podSelector finds no Pods",
        lambda m: spec(m, "NetworkPolicy", TIER)["podSelector"]["matchLabels"].update(a="b"),
    ),
    "a policy's port that no Pod has": Mistake(
        "references",
        "a port named rpc",
        lambda m: spec(m, "NetworkPolicy", TIER)["ingress"][0]["ports"][0].update(port="rpc"),
    ),
    "a probe of no port": Mistake(
        "references",
        "livenessProbe: no port web",
        lambda m: container(m, TIER)["livenessProbe"]["httpGet"].update(port="web"),
    ),
    "an account that is not there": Mistake(
        "references",
        "no ServiceAccount",
        lambda m: workload(m, TIER).pod.update(serviceAccountName="other"),
    ),
    "a role that is not there": Mistake(
        "references", "no Role kvtier-router", lambda m: without(m, "Role", ROUTER)
    ),
    "a volume that is not there": Mistake(
        "references",
        "no volume logs",
        lambda m: container(m, TIER)["volumeMounts"].append({"name": "logs", "mountPath": "/l"}),
    ),
    "a claim that is not there": Mistake(
        "references",
        "no PersistentVolumeClaim",
        lambda m: without(m, "PersistentVolumeClaim", "kvtier-model"),
    ),
    "a ConfigMap's key that is not there": Mistake(
        "references",
        "no key MODEL",
        lambda m: m.find("ConfigMap", "kvtier-values")["data"].pop("MODEL"),
    ),
    "a variable that is not there": Mistake(
        "references",
        "$(POD_ID) is no variable",
        lambda m: set_flag(container(m, ENGINE), "admin-api-key", "$(POD_ID)"),
    ),
    "certificates by subPath": Mistake(
        "references",
        "never renewed",
        lambda m: container(m, TIER)["volumeMounts"][0].update(subPath="tls.crt"),
    ),
    "two who decide how many engines there are": Mistake(
        "references",
        "replicas of its own",
        lambda m: spec(m, "Deployment", ENGINE).update(replicas=2),
        "watched",
    ),
}
