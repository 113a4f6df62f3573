"""A cluster on two raylets of this machine, one of which is killed; run by ``test_ray.py``.

Arguments: a folder, the cluster's file, its secret. Prints one line of JSON.
"""

import json
import sys
import time
from pathlib import Path

import httpx

from tandem.integrations.deploying.ray_cluster import RayCluster, set_ray_token
from tandem.integrations.deploying.spec import load_spec

HERE = "198.18.0.1"
"""Of the namespace that this runs in; Ray takes loopback for the machine's first address."""
START_S, WAIT_S = 240.0, 180.0
BODY = {"model": "demo", "prompt": "def merge(", "max_tokens": 16, "seed": 3}


def ask(url):
    """Ask until there is an answer; a request that comes too early is refused in words."""
    end_s = time.monotonic() + WAIT_S
    refused = 0
    while True:
        try:
            reply = httpx.post(url + "/v1/completions", json=BODY, timeout=WAIT_S, trust_env=False)
            if reply.status_code == 200:
                return reply.json()["choices"][0]["text"], refused
            assert reply.status_code >= 500, reply.text
        except httpx.TransportError:
            pass
        refused += 1
        assert time.monotonic() < end_s, "no answer"
        time.sleep(0.5)


def wait_replaced(cluster, pid):
    """Wait until another process is up in the place of the one that was lost."""
    end_s = time.monotonic() + START_S
    while True:
        told = {each["name"]: each for each in cluster.wait_up(START_S)}
        if told["all"]["pid"] != pid:
            return told
        assert time.monotonic() < end_s, "the launcher does not begin again"
        time.sleep(0.5)


def main():
    folder, file, secret = map(Path, sys.argv[1:])
    set_ray_token(secret, folder)
    import ray
    from ray.cluster_utils import Cluster

    spec = load_spec(file)
    head = {"num_cpus": 1, "resources": {"tandem_server": 1, "tandem_unified": 1},
            "include_dashboard": False, "node_ip_address": HERE}  # fmt: skip
    nodes = Cluster(initialize_head=True, head_node_args=head)
    here = {"node_ip_address": HERE}
    doomed = nodes.add_node(num_cpus=1, resources={"tandem_unified": 1}, **here)
    ray.init(address=nodes.address, _node_ip_address=HERE, log_to_driver=False)
    try:
        with RayCluster(spec, secret) as cluster:
            before = {each["name"]: each for each in cluster.wait_up(START_S)}
            url = f"http://127.0.0.1:{spec.servers.port}"
            first, _ = ask(url)
            nodes.remove_node(doomed, allow_graceful=False)
            # Of the process that is about to die, or of the next one.
            second, _ = ask(url)
            after = wait_replaced(cluster, before["all"]["pid"])
            third, refused = ask(url)
            print(json.dumps({"answers": [first, second, third], "refused": refused,
                              "before": before, "after": after}), flush=True)  # fmt: skip
    finally:
        ray.shutdown()
        nodes.shutdown()


if __name__ == "__main__":
    main()
