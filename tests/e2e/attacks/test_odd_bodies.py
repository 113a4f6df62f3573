"""Goal: no values of a request, and no adapter, change or end another client's request.

Method: sixteen streams ask again and again for answers that are known from a quiet run, tokens and
log-probabilities; beside them another client sends random odd requests, as many at a time, also to
adapters whose weights are near the largest float. A stream that ends otherwise, an answer 500, a
child that is replaced, a block that is left: each fails the test.
"""

import asyncio
import collections
import json
import os
import time

import httpx
import pytest
import torch
from odd_bodies import OddRequests
from safetensors.torch import load_file, save_file

from tandem.models.loading.hub import DEMO_FOLDER

NUM_GOOD = NUM_ODD = 16
TIMEOUT_S = 300.0
SHOWN = 20
ROW_ERRORS = ("the model's logits are not numbers", "no token can be chosen")
"""Of a request to an adapter that overflows; the second one if it has penalties."""
EXPECTED = {200, 400, 401, 403, 404, 413, 503, 504}
"""Statuses of odd requests; 500 with one of ``ROW_ERRORS`` alone."""
TEXT = "def split(path, size):\n    # Return the parts of a file, each of at most size bytes.\n"
RULES = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "seed": 9, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
)


def write_adapter(folder, a, b):
    """Write an adapter of all attention layers of the demo model; ``a`` and ``b`` fill it."""
    folder.mkdir()
    tensors = {}
    for path in DEMO_FOLDER.glob("*.safetensors"):
        for name, weight in load_file(path).items():
            if name.endswith("_proj.weight") and ".self_attn." in name:
                outputs, inputs = weight.shape
                key = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{key}.lora_A.weight"] = a(2, inputs)
                tensors[f"{key}.lora_B.weight"] = b(outputs, 2)
    assert tensors
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_adapters(folder):
    """Return folders by name; the first one is in order, the others overflow."""
    noise = torch.Generator().manual_seed(3)
    folder.mkdir(exist_ok=True)

    def draw(*shape):
        return 0.02 * torch.randn(shape, generator=noise)

    def fill(value):
        return lambda *shape: torch.full(shape, value)

    fills = {"good": (draw, draw), "both": (fill(3e38), fill(3e38)), "a": (fill(3e38), fill(0.0)),
             "b": (fill(1.0), fill(-3e38)), "denormal": (fill(1e-45), fill(1e-45))}  # fmt: skip
    return {name: write_adapter(folder / name, *parts) for name, parts in fills.items()}


def make_good(index):
    """Return the request of a good stream: of each rule, one of the model, one of an adapter."""
    rule = dict(RULES[index % len(RULES)])
    return {
        "model": ("demo", "good")[index // 4 % 2],
        # Half of them share a prefix with each other and with nothing else.
        "text": TEXT * (1 + index % 3) if index % 2 else f"# part {index}\n" + TEXT * 2,
        "sampling_params": {**rule, "max_new_tokens": 24 + 8 * (index % 3), "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": index % 3,
        "stream": True,
        "rid": f"good-{index}",
    }


async def read_good(client, body):
    """Return all that a stream says of its tokens: ids, text, log-probabilities to the last bit."""
    last = None
    async with client.stream("POST", "/generate", json=body) as response:
        if response.status_code != 200:
            return f"status {response.status_code}: {await response.aread()}"
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                last = json.loads(line.removeprefix("data: "))
                if "error" in last:
                    return str(last["error"])
    if last is None:
        return "silence"
    meta = last["meta_info"]
    told = (meta["finish_reason"], meta["output_token_logprobs"], meta["output_top_logprobs"])
    return json.dumps([last["output_ids"], last["text"], *told])


class Attack:
    def __init__(self, source, truth, end_s):
        self.source, self.truth, self.end_s = source, truth, end_s
        self.disturbed, self.failures = [], []
        self.num_streams = self.num_requests = 0
        self.statuses, self.reasons = collections.Counter(), collections.Counter()

    @property
    def is_over(self):
        return time.monotonic() > self.end_s

    def describe(self):
        return (
            f"streams={self.num_streams} disturbed={len(self.disturbed)} "
            f"odd={self.num_requests} failures={len(self.failures)} "
            f"statuses={dict(sorted(self.statuses.items()))} errors={dict(self.reasons)}"
        )

    async def stream(self, client, index):
        while not self.is_over:
            found = await read_good(client, make_good(index))
            self.num_streams += 1
            if found != self.truth[index]:
                self.disturbed.append((index, found))

    async def send(self, client):
        while not self.is_over:
            odd = self.source.draw()
            self.num_requests += 1
            try:
                await self.judge(client, odd)
            except httpx.HTTPError as error:
                self.failures.append((odd, repr(error)))

    async def judge(self, client, odd):
        async with client.stream(odd.method, odd.path, content=odd.body) as response:
            status = response.status_code
            self.statuses[status] += 1
            if odd.is_left and status == 200:
                return
            text = (await response.aread()).decode()
        if status == 500 and any(each in text for each in ROW_ERRORS):
            self.reasons["row"] += 1
        elif status not in EXPECTED or not text:
            self.failures.append((odd, f"{status}: {text}"))
        elif status == 200 and text.startswith("data: "):
            self.judge_events(odd, text)

    def judge_events(self, odd, text):
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        errors = [json.loads(e)["error"] for e in events if e.startswith('{"error"')]
        for error in errors:
            self.reasons[error["code"]] += 1
            is_own = error["code"] in ("deadline", "capacity")
            if not is_own and not error["message"].startswith(ROW_ERRORS):
                self.failures.append((odd, str(error)))
        if not errors and events[-1] != "[DONE]":
            self.failures.append((odd, "a stream without an end"))


async def run(server, minutes, seed):
    settings = {"base_url": server.url, "timeout": TIMEOUT_S, "trust_env": False}
    # A connection that is kept may be closed, as idle, while a slow client asks on it again.
    limits = httpx.Limits(max_connections=64, max_keepalive_connections=0)
    async with (
        httpx.AsyncClient(
            headers={"Authorization": "Bearer good"}, limits=limits, **settings
        ) as good,
        httpx.AsyncClient(
            headers={"Authorization": "Bearer odd"}, limits=limits, **settings
        ) as odd,
    ):
        truth = [await read_good(good, make_good(i)) for i in range(NUM_GOOD)]
        assert all(text.startswith("[") for text in truth), truth
        assert len(set(truth)) == NUM_GOOD
        models = ["demo", "demo", "good", "both", "a", "b", "denormal"]
        names = [f"good-{i}" for i in range(NUM_GOOD)]
        vocab_size = server.client.get("/server_info").json()["instance"]["vocab_size"]
        source = OddRequests(seed, models, names, vocab_size)
        attack = Attack(source, truth, time.monotonic() + 60 * minutes)
        tasks = [asyncio.create_task(attack.stream(good, i)) for i in range(NUM_GOOD)]
        tasks += [asyncio.create_task(attack.send(odd)) for _ in range(NUM_ODD)]
        told_s = time.monotonic()
        while not all(task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=1.0, return_when=asyncio.FIRST_EXCEPTION)
            if time.monotonic() > told_s + 20:
                told_s = time.monotonic()
                print(attack.describe(), flush=True)
            if any(task.done() and task.exception() for task in tasks):
                break
        await asyncio.gather(*tasks)
        return attack


PAIR = ["--prefill", "1", "--decode", "1", "--engine.kv-dtype", "int8"]


def list_pids(server):
    return [each["pid"] for each in server.client.get("/server_info").json()["instances"]]


@pytest.mark.parametrize(
    ("more_flags", "minutes"),
    [
        pytest.param([], 0.5, marks=pytest.mark.slow, id="half a minute"),
        pytest.param([], 20, marks=pytest.mark.long, id="20 minutes"),
        pytest.param(PAIR, 3, marks=pytest.mark.long, id="3 minutes of a pair"),
    ],
)
def test_no_odd_request_disturbs_another(serve_demo, tmp_path, more_flags, minutes):
    seed = int(os.environ.get("TANDEM_ATTACK_SEED", "1"))
    adapters = write_adapters(tmp_path / "adapters")
    flags = [f"--adapter={name}={folder}" for name, folder in adapters.items()]
    flags += ["--api-key", "good", "--api-key", "odd", "--engine.block-size", "16"]
    flags += ["--engine.max-model-len", "512", "--engine.num-kv-blocks", "1200"]
    with serve_demo(*flags, *more_flags) as server:
        server.client.headers["Authorization"] = "Bearer good"
        pids = list_pids(server)
        attack = asyncio.run(run(server, minutes, seed))
        print(f"\n{minutes} min: {attack.describe()}", flush=True)
        for each in (*attack.disturbed[:SHOWN], *attack.failures[:SHOWN]):
            print(str(each)[:2000])
        assert not attack.disturbed
        assert not attack.failures
        assert attack.num_streams >= NUM_GOOD
        server.wait_until(server.is_idle, 60)
        assert list_pids(server) == pids
        assert not [line for line in server.log if "Traceback" in line]
