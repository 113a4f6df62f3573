"""Goal: over three machines every answer is right or one error, whichever of them is lost.

Method: three network namespaces around one that routes, each link shaped to 1 Gbit/s: prefill and
the store's master, decode, and a server beside a store host. Under load one is cut off for 20 s,
another one is killed. An answer is right if it is, bit by bit, that of before.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"),
    reason="needs root, ip and tc (iproute2)",
)
START_S, WAIT_S = 240.0, 120.0
CUT_S = 20.0
RATE = ("root", "tbf", "rate", "1gbit", "burst", "512kb", "latency", "20ms")
PROMPTS = [f"def merge_{n}(left, right):\n    # Merge two sorted lists into one.\n" * 6
           for n in range(4)]  # fmt: skip
RPC = ["--rpc.lease-ms", "4000", "--rpc.heartbeat-interval-ms", "500"]
KEY = {"Authorization": "Bearer k"}


def run(*words):
    subprocess.run(words, check=True, capture_output=True, timeout=20)


class Machines:
    """Three namespaces around one that routes, which this process can reach."""

    def __init__(self, stack):
        self._tag = secrets.token_hex(2)
        self._net = f"198.18.{secrets.randbelow(250)}"
        self.hub = f"t{self._tag}h"
        self._stack, self.processes = stack, {}
        run("ip", "netns", "add", self.hub)
        stack.callback(run, "ip", "netns", "del", self.hub)
        forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
        run("ip", "netns", "exec", self.hub, "sh", "-c", forward)
        for number in (1, 2, 3):
            name = self.name(number)
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "del", name)
            self._connect(number, name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        self._connect(9, None)

    def name(self, number):
        return f"t{self._tag}m{number}"

    def address(self, number):
        return f"{self._net}.{number}"

    def _connect(self, number, space):
        ours, theirs = f"t{self._tag}v{number}", f"p{number}"
        words = ["ip", "link", "add", ours, "type", "veth", "peer", "name", theirs]
        run(*words, "netns", self.hub)
        address, router = self.address(number), self.address(100 + number)
        run("ip", "-n", self.hub, "addr", "add", router, "peer", address, "dev", theirs)
        run("ip", "-n", self.hub, "link", "set", theirs, "up")
        run("tc", "-n", self.hub, "qdisc", "add", "dev", theirs, *RATE)
        inside = [] if space is None else ["-n", space]
        if space is None:
            self._stack.callback(run, "ip", "link", "del", ours)
        else:
            run("ip", "link", "set", ours, "netns", space)
        run("ip", *inside, "addr", "add", address, "peer", router, "dev", ours)
        run("ip", *inside, "link", "set", ours, "up")
        run("ip", *inside, "route", "add", f"{self._net}.0/24", "via", router)
        run("tc", *inside, "qdisc", "add", "dev", ours, *RATE)

    def set_link(self, number, state):
        """Cut a machine off, or connect it again."""
        theirs = f"p{number}"
        run("ip", "-n", self.hub, "link", "set", theirs, state)
        if state == "up":  # Routes go with a link.
            address = self.address(number)
            run("ip", "-n", self.hub, "route", "replace", address, "dev", theirs)

    def start(self, number, *words, env=None):
        """Run ``tandem`` on a machine; its first line of output says that it is up."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name(number), sys.executable, "-m", "tandem", *words],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.processes.setdefault(number, []).append(process)
        self._stack.callback(_end, process)
        return process

    def kill(self, number):
        """Kill all that runs on a machine at once."""
        pids = subprocess.run(
            ["ip", "netns", "pids", self.name(number)], capture_output=True, text=True, check=True
        )
        for pid in pids.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _end(process):
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def wait_up(*processes):
    """Wait until each has said something, which they do when they are up."""
    timer = threading.Timer(START_S, lambda: [each.kill() for each in processes])
    timer.start()
    try:
        for process in processes:
            assert process.stdout.readline(), f"{process.args} did not start"
    finally:
        timer.cancel()


class Load:
    """Asks on two threads until told to stop, and keeps what came of each request."""

    def __init__(self, url, truth):
        self._url, self._truth = url, truth
        self.wrong, self.num_right, self.num_errors = [], 0, 0
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(2)]

    def _run(self, number):
        with httpx.Client(base_url=self._url, timeout=WAIT_S, trust_env=False) as client:
            while not self._stop.is_set():
                status, answer = ask(client, number)
                with self._lock:
                    if status == 200 and answer == self._truth[number]:
                        self.num_right += 1
                    elif status >= 500 and answer.get("error", {}).get("message"):
                        self.num_errors += 1
                        time.sleep(0.2)
                    else:
                        self.wrong.append((number, status, answer))
                number = (number + 2) % len(self._truth)

    def wait_right(self, count):
        """Wait for so many more right answers."""
        begin_s, before = time.monotonic(), self.num_right
        while self.num_right < before + count and not self.wrong:
            assert time.monotonic() - begin_s < WAIT_S, (self.num_right, self.num_errors)
            time.sleep(0.05)

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * WAIT_S)


def ask(client, number):
    body = {"model": "demo", "prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": 24,
            "ignore_eos": True, "logprobs": 2, "temperature": 1.0, "seed": number}  # fmt: skip
    reply = client.post("/v1/completions", json=body, headers=KEY)
    if reply.status_code != 200:
        return reply.status_code, json.loads(reply.text)
    choice = reply.json()["choices"][0]
    return 200, (choice["text"], choice["logprobs"]["token_logprobs"])


@pytest.mark.slow
@needs_namespaces
def test_machines_that_are_cut_off_or_killed(tmp_path):
    with contextlib.ExitStack() as stack:
        secret = tmp_path / "secret"
        run(sys.executable, "-m", "tandem", "cluster", "keys", str(secret))
        machines = Machines(stack)
        one, two, three = map(machines.address, (1, 2, 3))
        master = f"tcp://{one}:7400"
        store = {"TANDEM_STORE__SECRET": secret.read_text().strip()}
        shared = ["--engine.block-size", "16", "--engine.kv-cache-gib", "0.1", *RPC]
        trust = ["--cluster.secret-file", str(secret)]

        def launch(number, role):
            where = ["--launcher.listen", f"tcp://{machines.address(number)}:7100"]
            where += ["--launcher.name", f"m{number}", "--launcher.drain-timeout-s", "1"]
            command = ["cluster", "launch", "demo", f"--cluster.{role}", "1", *where]
            command += ["--store.master", master, *trust, *shared]
            return machines.start(number, *command, env=store)

        wait_up(machines.start(1, "store", "master", "--store.master", master, *RPC, env=store))
        host = ["store", "host", "--store.master", master, "--store.listen", f"{three}:0"]
        size = ["--store.segment-bytes", str(64 << 20), *RPC]
        wait_up(
            machines.start(3, *host, *size, env=store), launch(1, "prefill"), launch(2, "decode")
        )
        server = ["serve", "demo", "--host", three, "--port", "8000", "--server.api-key", "k"]
        found = ["--cluster.launchers", f"tcp://{one}:7100,tcp://{two}:7100", *trust]
        wait_up(machines.start(3, *server, *found, *RPC, "--cluster.recovery-s", "30"))
        url = f"http://{three}:8000"
        with httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False) as client:
            truth = [ask(client, number)[1] for number in range(8)]
            assert all(isinstance(each, tuple) for each in truth), truth
            info = client.get("/server_info", headers=KEY).json()
            assert {each["role"] for each in info["instances"]} == {"prefill", "decode"}
            stats = info["stats"]
            assert stats["peer_read_blocks"], "decode has read of prefill, over the link"
            assert stats["stored_blocks"], "the store has some, over another one"
            with Load(url, truth) as load:
                load.wait_right(4)
                machines.set_link(2, "down")
                time.sleep(CUT_S)
                machines.set_link(2, "up")
                load.wait_right(8)
                machines.kill(1)
                load.wait_right(8)
            assert load.wrong == []
            print(f"{load.num_right} right, {load.num_errors} errors")
