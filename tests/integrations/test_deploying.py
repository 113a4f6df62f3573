"""Goal: one file describes a cluster; its processes and its manifests are what that says.

Method: manifests against the bundled schemas, Kubernetes' own and the subsets written by hand; the
arguments of every process are parsed by the commands that they are for.
"""

import json
import re
from pathlib import Path

import msgspec
import pytest
import yaml

from tandem.cli.config import load_config
from tandem.core.errors import ConfigError, UnsupportedError
from tandem.integrations.deploying.kubernetes import dump_manifests, render_manifests
from tandem.integrations.deploying.manifests import check_manifests, list_problems
from tandem.integrations.deploying.processes import count_bytes
from tandem.integrations.deploying.ray_cluster import plan_ray
from tandem.integrations.deploying.runner import plan_local
from tandem.integrations.deploying.spec import load_spec
from tandem.server.telemetry.metrics import METRICS

EXAMPLES = Path(__file__).parents[2] / "examples/cluster"
TEXT = """
name: chat
model: demo
settings: {engine: {block_size: 16, kv_cache_gib: 0.1}}
groups:
  - name: prefill
    role: prefill
    launchers: 2
    resources: {cpu: "8", memory: 32Gi, gpu: 1}
    node_selector: {gpu: h100}
  - {name: decode, role: decode, instances: 2, settings: {engine: {block_size: 32}}}
servers: {count: 2, settings: {server: {max_in_flight: 7}}}
store: {hosts: 2, memory: 1Gi}
monitoring: true
"""


@pytest.fixture
def spec(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(TEXT)
    return load_spec(file)


def by_kind(manifests, kind):
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] == kind}


@pytest.mark.parametrize("sets", [False, True])
def test_manifests_fit_their_schemas(spec, sets):
    spec = msgspec.structs.replace(spec, leader_worker_sets=sets)
    manifests = list(yaml.safe_load_all(dump_manifests(render_manifests(spec))))
    assert [problem for each in manifests for problem in list_problems(each)] == []
    kind = "LeaderWorkerSet" if sets else "Deployment"
    assert {"chat-prefill", "chat-decode"} <= set(by_kind(manifests, kind))
    assert set(by_kind(manifests, "ServiceMonitor")) == {"chat-server"}


def test_what_a_schema_does_not_allow_is_told_with_its_place(spec):
    manifests = render_manifests(spec)
    server = by_kind(manifests, "Deployment")["chat-server"]
    server["spec"]["replicas"] = "two"
    container = server["spec"]["template"]["spec"]["containers"][0]
    container["livenessProb"] = container.pop("livenessProbe")
    monitor = by_kind(manifests, "ServiceMonitor")["chat-server"]
    monitor["spec"]["endpoints"][0]["every"] = "15s"
    with pytest.raises(UnsupportedError) as raised:
        check_manifests([*manifests, {"apiVersion": "v1", "kind": "Pud"}])
    for part in ("spec.replicas", "livenessProb", "'every'", "v1/Pud: there is no schema"):
        assert part in str(raised.value)


def test_pods_are_probed_drained_and_hold_no_secret(spec):
    manifests = render_manifests(spec)
    deployments = by_kind(manifests, "Deployment")
    for name, each in deployments.items():
        pod = each["spec"]["template"]["spec"]
        [container] = pod["containers"]
        # The time to drain, and some more, before a process is killed.
        assert pod["terminationGracePeriodSeconds"] > spec.drain_s
        secrets = [value for value in container["env"] if "SECRET" in value["name"]]
        assert all("valueFrom" in value for value in secrets), "named, never written down"
        if name != "chat-store":
            assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)
    server = deployments["chat-server"]["spec"]["template"]["spec"]["containers"][0]
    assert server["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert server["lifecycle"]["preStop"]["sleep"]["seconds"] > 0
    prefill = deployments["chat-prefill"]["spec"]
    assert (prefill["replicas"], prefill["template"]["spec"]["nodeSelector"]) == (
        2,
        {"gpu": "h100"},
    )
    limits = prefill["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "1"}
    # Servers find launchers by the names of headless services, ready or not.
    services = by_kind(manifests, "Service")
    for name in ("chat-prefill", "chat-decode", "chat-store-master"):
        assert services[name]["spec"]["clusterIP"] == "None"
        assert services[name]["spec"]["publishNotReadyAddresses"]
        selector = services[name]["spec"]["selector"]
        labels = deployments[name]["spec"]["template"]["metadata"]["labels"]
        assert selector.items() <= labels.items()


def parse(arguments):
    """Return the configuration that a command would run with, flags as its parser takes them."""
    words = list(arguments)
    skipped = {"serve": 2, "cluster": 3, "store": 2}[words[0]]
    flags = {}
    for flag, value in zip(words[skipped::2], words[skipped + 1 :: 2], strict=True):
        name = {"--host": "server.host", "--port": "server.port"}.get(flag, flag[2:])
        flags[name.replace(".", "__").replace("-", "_")] = value
    return load_config(None, flags).config


def test_the_processes_of_a_machine_find_each_other(spec, tmp_path):
    plans = {plan.name: plan for plan in plan_local(spec, tmp_path)}
    assert list(plans) == [
        "store-master", "store-0", "store-1", "prefill-0", "prefill-1", "decode", "server-0",
        "server-1",
    ]  # fmt: skip
    configs = {name: parse(plan.arguments) for name, plan in plans.items()}
    master = configs["store-master"].store.master
    assert master.startswith("ipc://")
    assert {configs[name].store.master for name in plans if "server" not in name} == {master}
    listens = [configs[name].launcher.listen for name in ("prefill-0", "prefill-1", "decode")]
    assert len(set(listens)) == 3
    for number in range(2):
        server = configs[f"server-{number}"]
        assert list(server.cluster.launchers) == listens
        assert server.server.port == 8000 + number
    assert configs["store-0"].store.segment_bytes == 2**30
    assert (configs["prefill-1"].cluster.prefill, configs["decode"].cluster.decode) == (1, 2)
    assert plans["decode"].settings == {"engine": {"block_size": 32, "kv_cache_gib": 0.1}}
    assert plans["server-1"].settings["server"] == {"max_in_flight": 7}


def test_on_ray_a_launcher_is_found_on_any_machine(spec):
    plans = {plan.name: plan for plan in plan_ray(spec, ["10.0.0.1", "10.0.0.2"])}
    found = parse(plans["server-0"].arguments).cluster.launchers
    assert len(found) == len(set(found)) == 3 * 2
    ports = []
    for name in ("prefill-0", "prefill-1", "decode"):
        listen = plans[name].arguments[plans[name].arguments.index("--launcher.listen") + 1]
        ports.append(listen.rpartition(":")[2])
        for host in ("10.0.0.1", "10.0.0.2"):
            assert listen.replace("$(NODE_IP)", host) in found
    assert len(set(ports)) == 3, "two of them may come to lie on one machine"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("image: 7", "str"),
        ("nothing: 7", "nothing"),
        ("name: Upper", "name"),
        ("settings: {launcher: {listen: x}}", "launcher.listen follows"),
        ("settings: {store: {master: x}}", "store.master follows"),
        ("groups: []", "groups"),
        ("groups: [{name: a}, {name: a}]", "one name"),
        ("groups: [{name: a, role: prefill}]", "need each other"),
        ("store: {memory: much}", "memory"),
        ("a: [", "no YAML"),
    ],
)
def test_what_is_no_cluster_is_refused(tmp_path, change, what):
    file = tmp_path / "cluster.yaml"
    values = yaml.safe_load(TEXT)
    try:
        values |= yaml.safe_load(change)
        file.write_text(yaml.safe_dump(values))
    except yaml.YAMLError:
        file.write_text(change)
    with pytest.raises(ConfigError, match=what):
        load_spec(file)


@pytest.mark.parametrize(
    ("quantity", "size"), [("1Gi", 2**30), ("8192", 8192), ("1.5Mi", 1536 * 1024), ("500m", 0)]
)
def test_amounts_of_memory_are_whole_pages(quantity, size):
    assert count_bytes(quantity) == size


def test_the_example_is_a_cluster():
    spec = load_spec(EXAMPLES / "cluster.yaml")
    check_manifests(render_manifests(spec))


def test_the_dashboard_asks_for_metrics_that_exist():
    metrics = {metric.name: metric for metric in METRICS}
    board = json.loads((EXAMPLES / "grafana_dashboard.json").read_text())
    asked = [
        (panel["title"], target["expr"])
        for panel in board["panels"]
        for target in panel.get("targets", [])
    ]
    assert len(asked) > 20
    used = set()
    for title, query in asked:
        found = re.findall(r"(tandem:\w+)(?:\{(.*?)\})?", query)
        assert found, title
        for name, labels in found:
            stem = name.removesuffix("_bucket")
            assert stem in metrics, f"{title}: {name}"
            assert (metrics[stem].kind == "histogram") == (stem != name), f"{title}: {name}"
            used.add(stem)
            known = {*metrics[stem].labels, "le"}
            assert set(re.findall(r"(\w+)\s*(?:=~|!=|=)", labels)) <= known, f"{title}: {labels}"
        for group in re.findall(r"by \((.*?)\)", query):
            known = {"le"}.union(
                *(metrics[name.removesuffix("_bucket")].labels for name, _ in found)
            )
            assert set(group.split(", ")) <= known, f"{title}: by {group}"
    assert {"tandem:time_to_first_token_seconds", "tandem:slo_requests_total"} <= used
