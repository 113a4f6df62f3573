"""Goal: servers before the same instances are alike; one may be killed, its clients ask another.

Method: real processes of the demo model: a launcher, two servers, and a client that retries with
the request id that it was told, and gets the same tokens.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

START_S = 120.0
WAIT_S = 60.0
PROMPT = "def merge(left, right):\n    # Merge two sorted lists into one.\n"
BODY = {"model": "demo", "prompt": PROMPT, "max_tokens": 200, "ignore_eos": True,
        "temperature": 1.0, "stream": True}  # fmt: skip
ADMIN = {"Authorization": "Bearer chief"}


@contextlib.contextmanager
def launch(endpoint, *flags):
    """Run ``tandem cluster launch demo`` until its instances serve."""
    command = [sys.executable, "-m", "tandem", "cluster", "launch", "demo", "--json"]
    process = subprocess.Popen(
        [*command, "--launcher.listen", endpoint, *flags], stdout=subprocess.PIPE, text=True
    )
    timer = threading.Timer(START_S, process.kill)
    timer.start()
    text = ""
    try:
        for line in process.stdout:
            text += line
            with contextlib.suppress(json.JSONDecodeError):
                assert json.loads(text)["instances"]
                timer.cancel()
                break
        else:
            raise AssertionError(f"the launcher did not start: {text}")
        yield process
    finally:
        timer.cancel()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def stream(server, request_id, on_token=None):
    """Return the text of a streamed answer; what had come, if the server died on the way."""
    parts = []
    headers = {"x-request-id": request_id}
    with (
        contextlib.suppress(Exception),
        server.client.stream(
            "POST", "/v1/completions", json=BODY, headers=headers, timeout=WAIT_S
        ) as reply,
    ):
        assert reply.headers["x-request-id"] == request_id
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                parts.append(json.loads(line[6:])["choices"][0]["text"])
                if on_token is not None:
                    on_token(len(parts))
            if line == "data: [DONE]":
                return "".join(parts), True
    return "".join(parts), False


@pytest.mark.slow
def test_a_client_of_a_killed_server_gets_the_same_tokens_of_another(tmp_path, serve_demo):
    tmp_path.chmod(0o700)
    endpoint = f"ipc://{tmp_path}/l.sock"
    attach = ["--cluster.launchers", endpoint, "--server.admin-api-key", "chief"]
    with (
        launch(endpoint, "--unified", "2") as launcher,
        contextlib.ExitStack() as doomed,
        serve_demo(*attach) as second,
    ):
        first = doomed.enter_context(serve_demo(*attach))
        truth, is_whole = stream(second, "retried-1")
        assert is_whole and len(truth) > 100
        assert stream(first, "retried-1") == (truth, True)
        assert stream(first, "retried-2")[0] != truth, "another id is another seed"

        def kill(num_tokens):
            if num_tokens == 5:
                os.kill(first.process.pid, signal.SIGKILL)

        begun, is_whole = stream(first, "retried-1", kill)
        assert not is_whole
        assert truth.startswith(begun) and begun
        assert stream(second, "retried-1") == (truth, True)
        # The killed server's request was cancelled, whatever it had left to do.
        second.wait_until(second.is_idle, WAIT_S)

        def names():
            listed = second.client.get("/instances", headers=ADMIN).json()["instances"]
            return {each["name"]: each for each in listed}

        before = names()
        # A change goes to the launcher, which another server would hear of as well.
        reply = second.client.post("/instances", headers=ADMIN, timeout=WAIT_S,
                                   json={"action": "restart", "patience_s": 20})  # fmt: skip
        assert reply.status_code == 200, reply.text
        assert {each["pid"] for each in names().values()}.isdisjoint(
            each["pid"] for each in before.values()
        )
        assert stream(second, "retried-1") == (truth, True)
        # An instance that dies is the launcher's to replace; requests wait for it, or go elsewhere.
        for each in names().values():
            os.kill(each["pid"], signal.SIGKILL)
        assert stream(second, "retried-1") == (truth, True)
        assert launcher.poll() is None


@pytest.mark.slow
def test_the_lease_of_a_server_that_stands_still_ends(tmp_path, serve_demo):
    """It releases nothing: its requests end with its lease; whoever asks elsewhere is served."""
    tmp_path.chmod(0o700)
    endpoint = f"ipc://{tmp_path}/l.sock"
    lease = ["--rpc.lease-ms", "3000", "--rpc.heartbeat-interval-ms", "500"]
    attach = ["--cluster.launchers", endpoint, *lease]
    long = BODY | {"max_tokens": 1900}
    with (
        launch(endpoint, "--unified", "1", *lease),
        serve_demo(*attach) as second,
        serve_demo(*attach) as first,
    ):
        before = second.stats()["generated_tokens"]
        begun = threading.Event()

        def ask():
            with (
                contextlib.suppress(Exception),
                first.client.stream("POST", "/v1/completions", json=long,
                                    headers={"x-request-id": "held"}, timeout=WAIT_S) as reply,
            ):  # fmt: skip
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        begun.set()

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        assert begun.wait(WAIT_S)
        os.kill(first.process.pid, signal.SIGSTOP)
        try:
            # With the same id, while the request of the first one still runs there.
            assert stream(second, "held")[1]
            second.wait_until(second.is_idle, WAIT_S)
            assert second.stats()["generated_tokens"] - before < 1900, "it was cancelled"
        finally:
            os.kill(first.process.pid, signal.SIGCONT)
        asking.join(WAIT_S)
        assert not asking.is_alive(), "its client has an answer or an error"
        # It finds the instance again, and serves.
        first.wait_until(lambda: stream(first, "after")[1], WAIT_S)
