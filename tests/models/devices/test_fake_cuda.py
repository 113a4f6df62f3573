"""Goal: a model on a GPU has all its tensors there, and a step waits for no value of it.

Method: torch's fake tensors on ``cuda``. An operator whose tensors lie on two devices raises, and
so does a look at a value (``.item()``, ``.tolist()``, a shape that depends on values). The layers
of a decode run once more where each operator is looked at (``captured.py``).
"""

import numpy as np
import pytest
import torch
from captured import Captured, find_waits
from fake_cuda import load_fake, register_guard, run_without_inference
from odd_configs import MODEL_TYPES, make_odd
from quantized import CODERS, write_quantized
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from tandem._native import ThreadPool
from tandem.bench.serving.stored import SHAPE, write_random_gguf
from tandem.kernels.paged import PagedBatch, SequenceChunk
from tandem.kernels.weights.formats import WEIGHT_FORMATS
from tandem.models.families.registry import choose_auto_class
from tandem.models.planning.planner import plan_model

QUICK = ("deepseek_v3", "qwen3_next")
"""Latents and states; windows are in ``MIXTURES``. The others are ``slow``."""
BLOCK_SIZE = 16
CUDA = torch.device("cuda:0")
QUICK_KINDS = ("gptq 4 g32 act-order",)
SLOW_BLOCKS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("q8_0", "q5_0", "q6_k")]
MIXTURES = {
    "qwen3_moe": {"hidden_size": 128, "moe_intermediate_size": 128},
    "gpt_oss": {"hidden_size": 128, "intermediate_size": 128},
    "gemma4_text": {
        "hidden_size": 128,
        "moe_intermediate_size": 128,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 131,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
    },
}
"""Experts in a block of their own, with biases, and beside an MLP."""
FORMATS = [name for name, held in WEIGHT_FORMATS.items() if not held.is_stored_only]


@pytest.fixture(scope="module", autouse=True)
def guard(tmp_path_factory):
    register_guard(tmp_path_factory.mktemp("guard"))


class HostCopies(TorchDispatchMode):
    """Notes operators that give the host a tensor made of one on the device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = [a for a in args if isinstance(a, torch.Tensor)]
        is_far = any(a.device.type == "cuda" for a in given)
        if is_far and isinstance(out, torch.Tensor) and out.device.type != "cuda":
            self.found.append(str(func))
        return out


def make_batch(model, chunks):
    return PagedBatch.build(
        [
            SequenceChunk(
                token_ids=tokens,
                start=start,
                block_table=np.arange(4 * i, 4 * i + 4, dtype=np.int32),
                wants="last",
                state_slot=i,
            )
            for i, (tokens, start) in enumerate(chunks)
        ],
        BLOCK_SIZE,
        model.device,
    )


def check_steps(folder, monkeypatch, *, is_first_alone=False, **wishes):
    """A prompt, one that goes on, decodes of unequal length; then decodes alone.

    The first of these steps alone looks at every weight.
    """
    plan = plan_model(str(folder), device="cuda", **wishes)
    with load_fake(plan, ThreadPool(1), monkeypatch) as model:
        cache, states = model.allocate_kv(16, block_size=BLOCK_SIZE), model.allocate_states(4)
        steps = (
            [(list(range(3, 23)), 0), ([5, 6], 18), ([7], 3), ([8], 40)],
            [([7], 4), ([8], 41)],
        )
        for chunks in steps[:1] if is_first_alone else steps:
            batch = make_batch(model, chunks)
            with HostCopies() as copies:
                hidden = run_without_inference(model.compute_hidden, batch, cache, None, states)
                logits = run_without_inference(model.project, hidden)
            assert logits.device == CUDA
            assert logits.shape == (len(chunks), model.spec.num_logits)
            assert not copies.found
        if model.is_fused and not is_first_alone:
            assert find_waits(model, BLOCK_SIZE) == []
            model.enable_adapters(2)
            assert find_waits(model, BLOCK_SIZE) == []
    return plan


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in MODEL_TYPES]
)
def test_a_step_stays_on_the_device(name, tmp_path, monkeypatch):
    config = make_odd(name, 1)
    model = choose_auto_class(config).from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    check_steps(tmp_path, monkeypatch, expert_format="none", dtype="float32")


def list_formats():
    """Every format on three families, ``slow`` but for one.

    Experts in codes, in a block of their own, are those of the checkpoints with codes, below.
    """
    quick = {("gpt_oss", "f32")}
    return [
        pytest.param(family, name, marks=() if (family, name) in quick else pytest.mark.slow)
        for family in MIXTURES
        for name in FORMATS
    ]


@pytest.mark.parametrize(("family", "name"), list_formats())
def test_experts_of_the_host_are_one_operator(family, name, checkpoint, monkeypatch):
    """In every format that values are coded into; two experts of a token come a layer late."""
    folder = checkpoint(family, **MIXTURES[family])
    deferred = 0 if family == "gemma4_text" else 2
    wishes = {"expert_format": name, "dtype": "bfloat16", "deferred_experts": deferred}
    plan = check_steps(folder, monkeypatch, **wishes)
    assert {m.device for m in plan.matrices if m.role == "experts"} == {"cpu"}
    assert {m.device for m in plan.matrices if m.role != "experts"} == {"cuda"}
    assert plan.experts.weight_format == name


@pytest.mark.parametrize(
    "kind",
    [k if k in QUICK_KINDS else pytest.param(k, marks=pytest.mark.slow) for k in CODERS],
)
def test_stored_codes_are_decoded_to_the_device(kind, checkpoint, monkeypatch):
    """Codes of a checkpoint: experts keep them on the host, other matrices become numbers."""
    folder = checkpoint("qwen3_moe", hidden_size=128, head_dim=64, moe_intermediate_size=128)
    write_quantized(folder, kind)
    check_steps(folder, monkeypatch, is_first_alone=True, dtype="bfloat16")


@pytest.mark.parametrize("kind", ["q4_k_m", *SLOW_BLOCKS])
def test_a_gguf_file_is_decoded_to_the_device(kind, tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    shape = SHAPE | {"num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 512}
    write_random_gguf(path, shape, kind)
    check_steps(path, monkeypatch, is_first_alone=True, dtype="bfloat16")


def test_two_places_are_found(tmp_path, monkeypatch):
    """Not vacuous: a weight that was left on the host, and a look at a value, raise."""
    config = make_odd("qwen2", 1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    plan = plan_model(str(tmp_path), device="cuda", dtype="float32")
    with load_fake(plan, ThreadPool(1), monkeypatch) as model:
        batch = make_batch(model, [([3, 4, 5], 0)])
        with pytest.raises(Exception, match="local_scalar_dense"):
            batch.token_ids.tolist()
        cache = model.allocate_kv(16, block_size=BLOCK_SIZE)
        cache.slots = [layer.cpu() for layer in cache.slots]
        with pytest.raises(RuntimeError, match="device"):
            run_without_inference(model.compute_hidden, batch, cache, None, None)


def test_what_a_graph_cannot_hold_is_found():
    """Not vacuous."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        there = torch.zeros(4, device=CUDA)
        for work, what in (
            (lambda: torch.tensor([1, 2]).to(CUDA), "the host"),
            (there.cpu, "on the host"),
            (lambda: there + torch.zeros(()), "of the host's"),
        ):
            with Captured() as captured:
                work()
            assert any(what in line for line in captured.found), captured.found
        with Captured(), pytest.raises(Exception, match="local_scalar_dense"):
            there[0].item()
