"""Training through our frozen weights against plain transformers and PEFT."""

import warnings

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from quick import rest_slow
from tandem._native import ThreadPool
from tandem.core.errors import ConfigError
from tandem.finetune.data.examples import Example, collate, pack
from tandem.finetune.recipes.targets import find_targets, name_targets
from tandem.finetune.training.model import load_frozen
from tandem.kernels.operators.frozen_linear import FrozenLinear
from tandem.models.gguf_export import export_gguf
from tandem.models.loading.hub import DEMO_FOLDER

STEPS = 4
BOUNDS = {"none": 1e-5, "bf16": 5e-3, "int8": 1e-2, "int4": 1e-1}
"""Largest relative difference of a step's loss, by format. The demo's weights are bf16, so that
format differs by the rounding of activations alone; the others change the weights as well."""


@pytest.fixture(scope="module")
def pool():
    return ThreadPool(2)


def make_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, 4000, (n,), generator=generator).tolist() for n in (24, 17)]
    return collate([Example(tuple(row), tuple(row)) for row in rows], 0)


def train(model, *, seed=7) -> list[float]:
    """Losses of a few steps of AdamW on one batch."""
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=8,
        target_modules=name_targets(model, find_targets(model, "all")),
    )
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        tuned = peft.get_peft_model(model, config).train()
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=3e-3)
    batch, losses = make_batch(), []
    for _ in range(STEPS):
        loss = tuned(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def plain() -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32)
    return train(model.requires_grad_(requires_grad=False))


@pytest.mark.parametrize("expert_format", rest_slow(["none", "int4"], BOUNDS))
def test_losses_are_those_of_plain_peft(expert_format, plain, pool):
    """Each step's loss, and that the steps change it by far more than the bound."""
    frozen = load_frozen("demo", expert_format=expert_format, pool=pool)
    losses = train(frozen.model)
    bound = BOUNDS[expert_format]
    assert max(abs(a / b - 1) for a, b in zip(losses, plain, strict=True)) < bound
    assert plain[0] / plain[-1] - 1 > 0.1
    assert losses[-1] < losses[0]


def test_packed_linear_layers_under_adapters(plain, pool):
    """PEFT wraps our packed matrices, and gradients pass through them."""
    frozen = load_frozen("demo", expert_format="bf16", linear_format="bf16", pool=pool)
    assert frozen.model.model.layers[0].self_attn.q_proj.weight.numel() == 0
    losses = train(frozen.model)
    assert max(abs(a / b - 1) for a, b in zip(losses, plain, strict=True)) < 1e-2


def test_targets(pool):
    """``all`` is neither router nor head nor routed experts; a wrong name is refused."""
    model = load_frozen("demo", pool=pool).model
    targets = find_targets(model, "all")
    assert name_targets(model, targets) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert find_targets(model, "q_proj") == [t for t in targets if t.endswith("q_proj")]
    assert find_targets(model, "all,experts") == targets
    assert find_targets(model, "experts") == []
    with pytest.raises(ConfigError, match="choose of all, experts, "):
        find_targets(model, "gate_up_proj")
    with pytest.raises(ConfigError, match="q_prj"):
        find_targets(model, "q_prj")


def test_packed_rows_do_not_see_each_other(pool):
    """The logits of an example are the same alone and in a packed row."""
    model = load_frozen("demo", expert_format="none", pool=pool).model.eval()
    rows = [tuple(range(10, 10 + n)) for n in (9, 6)]
    packed = collate(pack([Example(r, r) for r in rows], 16), 0)
    with torch.no_grad():
        together = model(input_ids=packed["input_ids"], position_ids=packed["position_ids"]).logits
        for row, begin in zip(rows, (0, 9), strict=True):
            alone = model(input_ids=torch.tensor([row])).logits[0]
            torch.testing.assert_close(together[0, begin : begin + len(row)], alone)


@pytest.mark.parametrize("mixture", rest_slow(["q4_k_m"], ["q4_k_m", "q2_k"]))
def test_a_gguf_file_is_trained_on_its_own_codes(mixture, pool, tmp_path):
    """Codes are kept as the file has them, and training on them is training on their values.

    The oracle is torch on the decoded weights. The bound is that of rounding activations to int8.
    """
    export_gguf("demo", mixture, tmp_path / "model")
    decoded = load_frozen(str(tmp_path / "model"), expert_format="none", pool=pool)
    stored = load_frozen(
        str(tmp_path / "model"), expert_format="stored", linear_format="stored", pool=pool
    )
    packed = [matrix for matrix in stored.plan.matrices if matrix.weight_format != "none"]
    assert {matrix.role for matrix in packed} >= {"experts", "qkv"}
    for matrix in packed:
        assert matrix.size_bytes <= 1.02 * matrix.stored_bytes, matrix
    plain = dict(decoded.model.named_parameters())
    for name, module in stored.model.named_modules():
        if isinstance(module, FrozenLinear):
            assert torch.equal(module.packed.unpack(), plain[f"{name}.weight"]), name
    assert train(stored.model) == pytest.approx(train(decoded.model), rel=2e-2)
