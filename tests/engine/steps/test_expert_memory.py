"""Goal: a model of twice the memory that its process may take serves, and says the same tokens.

Method: a random model of 3 GiB; a process in a memory cgroup of half of that loads it by
``engine.memory`` and generates. Beside it, the same process without a limit. The kernel ends a
process that takes more.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="models need the `serve` extra")
pytest.importorskip("transformers", reason="models need the `serve` extra")

pytestmark = pytest.mark.slow

GIB = 1 << 30
LIMIT_BYTES = GIB + GIB // 2
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 512,
}
CHILD = """
import json, resource, sys
from tandem.core.clock import MonotonicClock
from tandem.core.wire import AddRequest, SamplingParams
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.models.config import ModelConfig

folder, packed, memory = sys.argv[1:]
model = ModelConfig(
    path=folder, dtype="bfloat16", expert_format="bf16", packed_cache=packed, proof="off"
)
config = EngineConfig(memory=memory, num_kv_blocks=16, max_model_len=256)
built = build_engine(model, config, MonotonicClock())
sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)
for i, prompt in enumerate(([*range(40)], [*range(400, 405)])):
    built.engine.add(AddRequest(request_id=str(i), prompt_ids=prompt, sampling=sampling))
found = {"0": [], "1": []}
while built.engine.has_requests:
    for output in built.engine.step():
        assert output.error_text is None, output.error_text
        found[output.request_id] += [
            [token, x.logprob]
            for token, x in zip(output.token_ids, output.logprobs, strict=True)
        ]
plan = built.model.plan
print(json.dumps({
    "found": found,
    "slots": None if plan.tier is None else plan.tier.num_slots,
    "weight_bytes": plan.weight_bytes,
}))
"""


@pytest.fixture
def limited():
    """The file that a process writes its id to in order to have no more than the limit."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    v1 = [m[1] for m in mounts if m[2] == "cgroup" and "memory" in m[3].split(",")]
    v2 = [m[1] for m in mounts if m[2] == "cgroup2"]
    name = f"tandem-test-{os.getpid()}"
    tried = [(Path(root), "memory.limit_in_bytes") for root in v1]
    tried += [(Path(root), "memory.max") for root in v2]
    for root, limit in tried:
        group = root / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(LIMIT_BYTES))
        except OSError:
            group.rmdir()
            continue
        try:
            yield group / "cgroup.procs"
        finally:
            # The kernel takes a moment to see that its processes are gone.
            for _ in range(100):
                try:
                    group.rmdir()
                    break
                except OSError:
                    time.sleep(0.05)
        return
    pytest.skip("no memory cgroup can be made, neither v1 nor v2: run as root outside a container")


def run(folder, packed, memory, group=None):
    def enter():
        if group is not None:
            group.write_text(str(os.getpid()))

    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), str(packed), memory],
        preexec_fn=enter,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_model_of_twice_the_limit_serves_the_same_tokens(tmp_path, limited):
    from tandem.bench.serving.model import write_random_model

    folder = tmp_path / "model"
    folder.mkdir()
    write_random_model(folder, SHAPE)
    small = run(folder, tmp_path / "packed", f"{LIMIT_BYTES}B", limited)
    assert small["weight_bytes"] > 2 * LIMIT_BYTES
    assert 1 <= small["slots"] < 16
    whole = run(folder, tmp_path / "packed", "")
    assert whole["slots"] is None
    assert small["found"] == whole["found"]
