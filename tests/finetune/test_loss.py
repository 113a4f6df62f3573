"""The loss that is taken piece by piece: value and gradients are those of transformers' own."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tandem.finetune.data.examples import IGNORED_LABEL
from tandem.finetune.training import loss as loss_module
from tandem.finetune.training.loss import compute_loss, find_head


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    model.model.layers[0].mlp.down_proj.weight.requires_grad_(True)
    return model.train()


def make_inputs():
    ids = torch.randint(0, 96, (3, 20), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :7] = IGNORED_LABEL
    labels[2] = IGNORED_LABEL
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("num_items", [None, 50])
def test_value_and_gradient(model, num_items, monkeypatch):
    """In pieces of a few rows, over the tokens of this batch or of a whole step."""
    monkeypatch.setattr(loss_module, "PIECE_BYTES", 0)
    monkeypatch.setattr(loss_module, "LEAST_ROWS", 5)
    weight = model.model.layers[0].mlp.down_proj.weight
    inputs = make_inputs()
    own = model(**inputs, **({} if num_items is None else {"num_items_in_batch": num_items})).loss
    (wanted,) = torch.autograd.grad(own, weight)
    plain = compute_loss(model, find_head(model), inputs, num_items)
    (got,) = torch.autograd.grad(plain, weight)
    torch.testing.assert_close(plain, own, rtol=1e-6, atol=0)
    assert float((got - wanted).norm() / wanted.norm()) < 1e-5


def test_other_losses_are_the_models_own(model, monkeypatch):
    """Capped logits, logits that are scaled, and a head that learns."""
    assert find_head(model) is not None
    with monkeypatch.context() as patch:
        patch.setattr(model.config, "final_logit_softcapping", 30.0, raising=False)
        assert find_head(model) is None
    with monkeypatch.context() as patch:
        whole = model.lm_head.forward
        patch.setattr(model.lm_head, "forward", lambda x: whole(x) * 8.0)
        assert find_head(model) is None
    model.lm_head.weight.requires_grad_(True)
    assert find_head(model) is None
    model.lm_head.weight.requires_grad_(False)
