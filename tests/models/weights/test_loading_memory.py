"""Goal: loading takes at most 1.1 times the packed model plus one layer of anonymous memory.

Method: a model of about 150 MB is written and loaded in a process of its own, which reads
``RssAnon`` and, as a machine may have huge pages set aside, ``HugetlbPages`` after every tensor.
Pages of the mapped file belong to the page cache and do not count.
"""

import json
import sys

import pytest
import torch
from forks import fork
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

PROBE = """
import sys
import torch
from tandem.models.loading.loader import load_model
from tandem.models.planning.planner import plan_model
import transformers.models.qwen3_moe.modeling_qwen3_moe

def anonymous():
    with open("/proc/self/status") as file:
        lines = [line.split() for line in file if line.startswith(("RssAnon", "HugetlbPages"))]
    return sum(int(size) << 10 for _, size, _ in lines)

load_model(plan_model(sys.argv[2]))
before = peak = anonymous()

def sample(*_):
    global peak
    peak = max(peak, anonymous())

model = load_model(plan_model(sys.argv[1], dtype=sys.argv[3]), progress=sample)
sample()
print(peak - before, model.weight_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_anonymous_memory(dtype, tmp_path, make_config, checkpoint):
    changes = {
        "vocab_size": 4096,
        "hidden_size": 512,
        "num_hidden_layers": 3,
        "num_experts": 32,
        "moe_intermediate_size": 512,
        "dtype": "bfloat16",
    }
    config = make_config("qwen3_moe", **changes)
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = {
        name: torch.zeros(p.shape, dtype=torch.bfloat16) for name, p in model.state_dict().items()
    }
    layer_bytes = sum(t.nbytes for name, t in tensors.items() if ".layers.0." in name)
    assert sum(t.nbytes for t in tensors.values()) > 140_000_000
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    printed = tmp_path / "printed"
    status = fork(PROBE, [str(tmp_path), str(checkpoint("qwen3_moe")), dtype], printed)
    assert status == 0, printed.read_text()
    used, packed = json.loads("[" + printed.read_text().strip().replace(" ", ",") + "]")
    scale = 2 if dtype == "float32" else 1
    assert packed > scale * 140_000_000
    assert used <= 1.1 * packed + scale * layer_bytes
    # The measurement sees the model at all.
    assert used >= 0.9 * packed
