"""Mistakes in programs and in who calls whom, and which check finds each."""

from __future__ import annotations

from mistakes import (
    ENGINE,
    REDIS,
    ROUTER,
    TIER,
    Mistake,
    container,
    set_flag,
    set_variable,
    spec,
    without,
    workload,
)

OF_PROGRAMS = {
    # certificates
    "a Secret that nothing makes": Mistake(
        "certificates", "nothing makes the Secret", lambda m: without(m, "Certificate", TIER)
    ),
    "a certificate for another name": Mistake(
        "certificates",
        "not for kvtier-tier",
        lambda m: spec(m, "Certificate", TIER).update(dnsNames=["tier"]),
    ),
    "a namespace that is not the common name": Mistake(
        "certificates",
        "its namespace is team",
        lambda m: set_variable(container(m, ENGINE), "KVTIER_TIER_NAMESPACE", "team"),
    ),
    "a namespace that no tier serves": Mistake(
        "certificates",
        "no tier serves",
        lambda m: set_flag(container(m, TIER), "namespace", "others=1g"),
    ),
    "an authority that is none": Mistake(
        "certificates",
        "no authority",
        lambda m: spec(m, "Certificate", "kvtier-authority").update(isCA=False),
    ),
    "a key that cannot be read": Mistake(
        "certificates",
        "without fsGroup",
        lambda m: workload(m, TIER).pod["securityContext"].pop("fsGroup"),
    ),
    # limits
    "a grace period shorter than the drain": Mistake(
        "limits", "killed after 300 s", lambda m: set_flag(container(m, TIER), "drain-s", "290")
    ),
    "a grace period shorter than writing to disk": Mistake(
        "limits",
        "killed after 100 s",
        lambda m: workload(m, TIER).pod.update(terminationGracePeriodSeconds=100),
    ),
    "a router that is killed while it drains": Mistake(
        "limits",
        "killed after 30 s",
        lambda m: workload(m, ROUTER).pod.pop("terminationGracePeriodSeconds"),
    ),
    "a preStop that takes it all": Mistake(
        "limits",
        "killed after 900 s",
        lambda m: container(m, ENGINE)["lifecycle"]["preStop"]["sleep"].update(seconds=600),
    ),
    "a limit below the store": Mistake(
        "limits", "may take", lambda m: set_flag(container(m, TIER), "memory", "52g")
    ),
    "a store larger than /dev/shm": Mistake(
        "limits",
        "of /dev/shm, which has 1Gi",
        lambda m: workload(m, ENGINE).volumes["shm"]["emptyDir"].update(sizeLimit="1Gi"),
        "single-gpu",
    ),
    "memory that may be taken away": Mistake(
        "limits",
        "is not its limit",
        lambda m: container(m, TIER)["resources"]["requests"].update(memory="1Gi"),
    ),
    "no limit": Mistake(
        "limits", "no memory limit", lambda m: container(m, ENGINE).pop("resources")
    ),
    # flags
    "a flag that SGLang does not have": Mistake(
        "flags", "--model-pth", lambda m: container(m, ENGINE)["args"].append("--model-pth=x")
    ),
    "a setting out of range": Mistake(
        "flags", "QUALITY", lambda m: set_variable(container(m, ENGINE), "KVTIER_QUALITY", "95")
    ),
    "a file that no Secret has": Mistake(
        "flags",
        "--client-ca",
        lambda m: set_flag(container(m, TIER), "client-ca", "/certificates/ca.pem"),
    ),
    "a tier without TLS": Mistake(
        "flags",
        "--listen",
        lambda m: [
            set_flag(container(m, TIER), f, None) for f in ("certificate", "key", "client-ca")
        ],
    ),
    "a size that is none": Mistake(
        "flags", "--memory", lambda m: set_flag(container(m, TIER), "memory", "much")
    ),
    "a policy that the router does not have": Mistake(
        "flags", "sticky", lambda m: set_flag(container(m, ROUTER), "policy", "sticky")
    ),
    "a flag that calibrating does not have": Mistake(
        "flags",
        "--lenght",
        lambda m: container(m, "kvtier-calibration")["args"].append("--lenght=4k"),
    ),
    "a program that nobody knows": Mistake(
        "flags",
        "no parser of",
        lambda m: container(m, TIER).update(command=["tini", "--", "other"]),
    ),
    # network
    "a call that its own side forbids": Mistake(
        "network",
        "StatefulSet/kvtier-tier, TCP 7070: no Egress",
        lambda m: spec(m, "NetworkPolicy", "kvtier-engine-calls")["egress"].pop(0),
    ),
    "a call that the other side forbids": Mistake(
        "network",
        "StatefulSet/kvtier-redis, TCP 6379: no Ingress",
        lambda m: spec(m, "NetworkPolicy", REDIS).update(ingress=[]),
    ),
    "another port than the policy's": Mistake(
        "network",
        "TCP 30001: no",
        lambda m: set_flag(container(m, ROUTER), "service-discovery-port", "30001"),
    ),
    "no names": Mistake(
        "network",
        "the cluster's DNS, UDP 53: no Egress",
        lambda m: spec(m, "NetworkPolicy", "kvtier-dns").update(egress=[]),
    ),
    "no way to the Kubernetes API": Mistake(
        "network",
        "an address outside, TCP 443: no Egress",
        lambda m: spec(m, "NetworkPolicy", ROUTER)["egress"].pop(),
    ),
    "no way to the model": Mistake(
        "network",
        "Job/kvtier-model -> an address outside",
        lambda m: without(m, "NetworkPolicy", "kvtier-model"),
    ),
    "a scrape that is forbidden": Mistake(
        "network",
        "Prometheus -> StatefulSet/kvtier-tier",
        lambda m: without(m, "NetworkPolicy", "kvtier-metrics"),
        "watched",
    ),
    "segments that cannot be reached": Mistake(
        "network",
        "any port: no Ingress",
        lambda m: without(m, "NetworkPolicy", "kvtier-mooncake-segments"),
        "composed",
    ),
    "an engine that is open to all": Mistake(
        "network",
        "a Pod of another namespace -> Deployment/kvtier-engine",
        lambda m: spec(m, "NetworkPolicy", ENGINE)["ingress"][0].pop("from"),
    ),
    "a front door that is closed": Mistake(
        "network",
        "the front door is closed",
        lambda m: spec(m, "NetworkPolicy", ROUTER).update(ingress=[]),
    ),
    "no default": Mistake(
        "network",
        "no policy closes its Egress",
        lambda m: [
            without(m, "NetworkPolicy", one) for one in ("kvtier-default-deny", "kvtier-dns")
        ],
    ),
    # images
    "another's image by its tag": Mistake(
        "images",
        "not named by its digest",
        lambda m: container(m, REDIS).update(image="docker.io/valkey/valkey:8.1.9-alpine"),
    ),
    "an image of another version": Mistake(
        "images",
        "is no image of kvtier",
        lambda m: container(m, TIER).update(image="r.example/kvtier-tier:0.0.9"),
    ),
    "a slash too many": Mistake(
        "images",
        "ends with a slash",
        lambda m: container(m, TIER).update(image="r.example//kvtier-tier:0.1.0"),
    ),
    "a value that is not set": Mistake(
        "images",
        "IMAGES is not set",
        lambda m: m.find("ConfigMap", "kvtier-values")["data"].update(IMAGES=""),
    ),
}
