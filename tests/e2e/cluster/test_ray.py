"""Goal: on Ray a process begins again on another node when its own is lost, and is found there.

Method: two raylets in a network namespace, where all of Ray is out of anybody's reach.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.rpc import generate_secret, write_secret

TIMEOUT_S = 540.0
TEXT = """
name: tiny
model: demo
settings: {{engine: {{block_size: 16, kv_cache_gib: 0.05}}}}
groups: [{{name: all, role: unified}}]
servers: {{count: 1, port: {server}}}
port: {launcher}
drain_s: 1
"""


def free_ports(count):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        first = probe.getsockname()[1]
    return range(first, first + count)


ISOLATED = 'ip link set lo up; ip addr add 198.18.0.1/32 dev lo; exec "$@"'


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"),
    reason="needs root, ip and unshare",
)
def test_a_launcher_of_a_killed_node_serves_on_another(tmp_path):
    pytest.importorskip("ray", reason="needs ray: pip install 'tandem-llm[ray]'")
    server, launcher, *_ = free_ports(2)
    file, secret, folder = tmp_path / "c.yaml", tmp_path / "secret", tmp_path / "run"
    file.write_text(TEXT.format(server=server, launcher=launcher))
    write_secret(secret, generate_secret())
    folder.mkdir(mode=0o700)
    program = Path(__file__).with_name("ray_program.py")
    done = subprocess.run(
        [
            *("unshare", "-n", "sh", "-c", ISOLATED, "sh", sys.executable, str(program)),
            *(str(folder), str(file), str(secret)),
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    first, second, third = told["answers"]
    assert first == second == third
    before, after = told["before"], told["after"]
    assert set(before) == set(after) == {"all", "server-0"}
    assert before["all"]["pid"] != after["all"]["pid"]
    assert before["server-0"]["pid"] == after["server-0"]["pid"], "it has found the new one"
