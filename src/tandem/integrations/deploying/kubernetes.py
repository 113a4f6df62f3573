"""A cluster as Kubernetes manifests. Pure.

Renders Deployments (or LeaderWorkerSets) of launchers and servers, the store's master and hosts,
services with names, and the settings as a ConfigMap. The cluster's secret is not rendered: make it
with ``tandem cluster keys`` and put it into a Secret of the name that the manifests refer to.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from tandem.integrations.deploying.processes import (
    Addresses,
    ProcessPlan,
    count_bytes,
    plan_groups,
    plan_servers,
    plan_store,
)
from tandem.integrations.deploying.spec import ClusterSpec, GroupSpec, Resources

__all__ = ["Manifest", "dump_manifests", "render_manifests"]

Manifest = dict[str, Any]

SETTINGS_FOLDER = "/etc/tandem"
END_S = 30
"""Seconds between the end of a pod's drain (finishing its requests) and SIGKILL."""
LOAD_S = 3600
"""Seconds that a model may take to load."""
PROBE_S = 5
DEREGISTER_S = 5
"""Seconds that load balancers may take until they no longer route to a pod that is ending."""
HERE = "$(POD_IP)"
"""A variable in arguments that Kubernetes replaces by the pod's address."""


def render_manifests(spec: ClusterSpec) -> list[Manifest]:
    """Return the Kubernetes manifests of a cluster, in the order in which to apply them."""
    master = f"{spec.name}-store-master"
    addresses = Addresses(
        launchers=[f"tcp://{_name(spec, group.name)}:{spec.port}" for group in spec.groups],
        store="" if spec.store is None else f"tcp://{master}:{spec.store.port}",
        store_listen="" if spec.store is None else f"tcp://{HERE}:{spec.store.port}",
        data_host=HERE,
    )
    launchers = plan_groups(
        spec, addresses, lambda *_: f"tcp://{HERE}:{spec.port}", lambda *_: "$(POD_NAME)",
        one_each=True,
    )  # fmt: skip
    service = _name(spec, "server")
    names = [service, f"{service}.{spec.namespace}", f"{service}.{spec.namespace}.svc"]
    [server] = plan_servers(spec, addresses, HERE, one=True, allowed_hosts=names)
    store = plan_store(spec, addresses, one=True)
    files = {f"{group.name}.yaml": plan.settings
             for group, plan in zip(spec.groups, launchers, strict=True)}  # fmt: skip
    files["server.yaml"] = server.settings
    manifests: list[Manifest] = [_make_settings(spec, files)]
    for plan in store:
        manifests += _make_store(spec, plan)
    for group, plan in zip(spec.groups, launchers, strict=True):
        manifests += _make_group(spec, group, plan)
    manifests += _make_servers(spec, server)
    return manifests


def dump_manifests(manifests: Sequence[Manifest]) -> str:
    """Return Kubernetes manifests as one YAML text, with a document for each."""
    return yaml.safe_dump_all(manifests, sort_keys=False, width=100)


def _name(spec: ClusterSpec, part: str) -> str:
    return f"{spec.name}-{part}"


def _meta(spec: ClusterSpec, part: str) -> Manifest:
    return {
        "name": _name(spec, part),
        "namespace": spec.namespace,
        "labels": _labels(spec, part),
    }


def _labels(spec: ClusterSpec, part: str) -> Manifest:
    return {
        "app.kubernetes.io/name": "tandem",
        "app.kubernetes.io/instance": spec.name,
        "app.kubernetes.io/component": part,
    }


def _make_settings(spec: ClusterSpec, files: Mapping[str, Mapping[str, Any]]) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _meta(spec, "settings"),
        "data": {
            name: yaml.safe_dump(dict(values), sort_keys=False) if values else "{}\n"
            for name, values in files.items()
        },
    }


def _make_group(spec: ClusterSpec, group: GroupSpec, plan: ProcessPlan) -> list[Manifest]:
    container = _make_container(spec, plan, group.resources, settings=f"{group.name}.yaml")
    container["ports"] = [{"name": "launcher", "containerPort": spec.port}]
    # Launchers listen at once, and instances listen before their model is loaded, so a port that
    # does not answer means that the process has died.
    container["startupProbe"] = _probe({"tcpSocket": {"port": spec.port}}, LOAD_S // PROBE_S)
    container["livenessProbe"] = _probe({"tcpSocket": {"port": spec.port}}, 6)
    container["readinessProbe"] = _probe({"tcpSocket": {"port": spec.port + 1}}, 1)
    pod = _make_pod(spec, group.name, container)
    if group.node_selector:
        pod["spec"]["nodeSelector"] = dict(group.node_selector)
    if spec.leader_worker_sets:
        workload = _make_leader_worker_set(spec, group, pod)
    else:
        workload = _make_deployment(spec, group.name, group.launchers, pod)
    return [_make_headless_service(spec, group.name, {"launcher": spec.port}), workload]


def _make_servers(spec: ClusterSpec, plan: ProcessPlan) -> list[Manifest]:
    part, port = "server", plan.port
    container = _make_container(spec, plan, spec.servers.resources, settings="server.yaml")
    container["env"].append(
        {
            "name": "TANDEM_SERVER__API_KEY",
            "valueFrom": {"secretKeyRef": {"name": _name(spec, "api-keys"), "key": "keys"}},
        }
    )
    container["ports"] = [{"name": "http", "containerPort": port}]
    container["startupProbe"] = _probe({"httpGet": _get("/live", port)}, LOAD_S // PROBE_S)
    container["livenessProbe"] = _probe({"httpGet": _get("/live", port)}, 6)
    container["readinessProbe"] = _probe({"httpGet": _get("/ready", port)}, 1)
    # Wait before the end, so that load balancers route new requests to other servers before this
    # one refuses them.
    container["lifecycle"] = {"preStop": {"sleep": {"seconds": DEREGISTER_S}}}
    service: Manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(spec, part),
        "spec": {
            "selector": _labels(spec, part),
            "ports": [{"name": "http", "port": port, "targetPort": "http"}],
        },
    }
    manifests = [
        service,
        _make_deployment(spec, part, spec.servers.count, _make_pod(spec, part, container)),
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": _meta(spec, part),
            "spec": {"maxUnavailable": 1, "selector": {"matchLabels": _labels(spec, part)}},
        },
    ]
    if spec.monitoring:
        manifests.append(
            {
                "apiVersion": "monitoring.coreos.com/v1",
                "kind": "ServiceMonitor",
                "metadata": _meta(spec, part),
                "spec": {
                    "selector": {"matchLabels": _labels(spec, part)},
                    "endpoints": [
                        {
                            "port": "http",
                            "path": "/metrics",
                            "interval": "15s",
                            "authorization": {
                                "credentials": {"name": _name(spec, "api-keys"), "key": "keys"}
                            },
                        }
                    ],
                },
            }
        )
    return manifests


def _make_store(spec: ClusterSpec, plan: ProcessPlan) -> list[Manifest]:
    assert spec.store is not None, "planned from it"
    store = spec.store
    if plan.kind == "store-master":
        container = _make_container(spec, plan, store.resources)
        container["ports"] = [{"name": "store", "containerPort": store.port}]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            container[probe] = _probe({"tcpSocket": {"port": store.port}}, 6)
        workload = _make_deployment(
            spec, "store-master", 1, _make_pod(spec, "store-master", container)
        )
        # Stop the old master before starting the new one: two at a time would both act as the
        # leader.
        workload["spec"]["strategy"] = {"type": "Recreate"}
        service = _make_headless_service(spec, "store-master", {"store": store.port})
        return [service, workload]
    container = _make_container(spec, plan, store.resources)
    container["volumeMounts"] = [{"name": "segment", "mountPath": "/dev/shm"}]  # noqa: S108
    pod = _make_pod(spec, "store", container)
    pod["spec"]["volumes"] = [
        {
            "name": "segment",
            "emptyDir": {
                "medium": "Memory",
                "sizeLimit": str(count_bytes(store.memory) + 64 * 2**20),
            },
        }
    ]
    return [_make_deployment(spec, "store", store.hosts, pod)]


def _make_container(
    spec: ClusterSpec, plan: ProcessPlan, resources: Resources, settings: str = ""
) -> Manifest:
    arguments = list(plan.arguments)
    if settings:
        arguments += ["--config", f"{SETTINGS_FOLDER}/{settings}"]
    section = "STORE" if plan.kind.startswith("store") else "CLUSTER"
    names = [f"TANDEM_{section}__SECRET"]
    if section == "CLUSTER" and plan.kind == "launcher" and spec.store is not None:
        names.append("TANDEM_STORE__SECRET")
    secret = {"secretKeyRef": {"name": _name(spec, "secret"), "key": "secret"}}
    container: Manifest = {
        "name": "tandem",
        "image": spec.image,
        "command": ["tandem"],
        "args": arguments,
        "env": [
            _field("POD_IP", "status.podIP"),
            _field("POD_NAME", "metadata.name"),
            *({"name": name, "valueFrom": secret} for name in names),
        ],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    wanted: dict[str, str] = {}
    if resources.cpu:
        wanted["cpu"] = resources.cpu
    if resources.memory:
        wanted["memory"] = resources.memory
    limits = dict(wanted)
    if resources.gpu:
        limits["nvidia.com/gpu"] = str(resources.gpu)
    if limits:
        container["resources"] = {"requests": wanted, "limits": limits}
    if settings:
        container["volumeMounts"] = [
            {"name": "settings", "mountPath": SETTINGS_FOLDER, "readOnly": True}
        ]
    return container


def _make_pod(spec: ClusterSpec, part: str, container: Manifest) -> Manifest:
    pod: Manifest = {
        "metadata": {"labels": _labels(spec, part)},
        "spec": {
            "terminationGracePeriodSeconds": int(spec.drain_s) + DEREGISTER_S + END_S,
            "automountServiceAccountToken": False,
            "containers": [container],
        },
    }
    if any(mount["name"] == "settings" for mount in container.get("volumeMounts", [])):
        pod["spec"]["volumes"] = [
            {"name": "settings", "configMap": {"name": _name(spec, "settings")}}
        ]
    return pod


def _make_deployment(spec: ClusterSpec, part: str, replicas: int, pod: Manifest) -> Manifest:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _meta(spec, part),
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": _labels(spec, part)},
            # Start the new pod before the old one drains, so that the number of serving pods does
            # not fall.
            "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": pod,
        },
    }


def _make_leader_worker_set(spec: ClusterSpec, group: GroupSpec, pod: Manifest) -> Manifest:
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": _meta(spec, group.name),
        "spec": {
            "replicas": group.launchers,
            "leaderWorkerTemplate": {
                "size": 1,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "workerTemplate": pod,
            },
        },
    }


def _make_headless_service(spec: ClusterSpec, part: str, ports: Mapping[str, int]) -> Manifest:
    """Return a service whose name resolves to each pod, also while pods load, since servers connect
    to loading launchers.
    """
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(spec, part),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _labels(spec, part),
            "ports": [{"name": name, "port": port} for name, port in ports.items()],
        },
    }


def _probe(check: Manifest, failures: int) -> Manifest:
    return {**check, "periodSeconds": PROBE_S, "timeoutSeconds": 3, "failureThreshold": failures}


def _get(path: str, port: int) -> Manifest:
    # Send ``Host: localhost``, since the server's list of allowed hosts lacks the pod's own
    # address.
    return {"path": path, "port": port, "httpHeaders": [{"name": "Host", "value": "localhost"}]}


def _field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
