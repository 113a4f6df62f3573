"""Goal: routed experts of transformers' own modules are computed by our operators, where they fit.

Method: Granite's experts beside an MLP, which no operator runs, are proved with our
operator. A mutant of it, and an activation that is none of ours, leave the class its own experts,
and it is still served.
"""

import copy

import pytest
import torch
from transformers import GraniteMoeSharedConfig, GraniteMoeSharedForCausalLM

from tandem._native import ThreadPool
from tandem.kernels.cpu.experts import NativeExperts
from tandem.models.own import prove
from tandem.models.own.experts import find_experts, place_experts
from tandem.models.own.prove import prove_own

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def test_experts_are_ours_and_proved():
    proof = prove_own(GraniteMoeSharedConfig())
    assert proof.is_proved, proof.problem
    assert proof.has_our_experts
    assert all("our experts" in check.name for check in proof.checks)


@pytest.mark.slow
def test_one_lucky_run_of_eager_code_does_not_decide(monkeypatch):
    """The bound holds for other orders of sums, even if the errors of the first run cancel."""
    run, asked = prove._run_whole, []

    def run_whole(eager, tokens):
        asked.append(eager)
        if len(asked) > 1:
            return run(eager, tokens)
        with prove._float64():
            return run(copy.deepcopy(eager).double(), tokens).float()

    monkeypatch.setattr(prove, "_run_whole", run_whole)
    assert prove_own(GraniteMoeSharedConfig()).has_our_experts


def test_wrong_experts_leave_the_class_its_own(monkeypatch):
    """The mutant forgets the weight of a token's last choice."""
    forward = NativeExperts.forward

    def forget(self, hidden_states, top_k_index, top_k_weights):
        weights = top_k_weights.clone()
        weights[:, -1] = 0
        return forward(self, hidden_states, top_k_index, weights)

    monkeypatch.setattr(NativeExperts, "forward", forget)
    proof = prove_own(GraniteMoeSharedConfig())
    assert proof.is_proved, proof.problem
    assert not proof.has_our_experts


def test_another_activation_is_not_replaced():
    model = GraniteMoeSharedForCausalLM(GraniteMoeSharedConfig(**SIZES, hidden_act="mish")).eval()
    assert not find_experts(model)
    assert place_experts(model, "float32", ThreadPool(1)) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sum_is_that_of_the_module(dtype):
    torch.manual_seed(0)
    model = GraniteMoeSharedForCausalLM(GraniteMoeSharedConfig(**SIZES)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    name = next(iter(find_experts(model)))
    x, weights = torch.randn(9, 48), torch.rand(9, 2)
    ids = torch.rand(9, 4).topk(2).indices
    with torch.inference_mode():
        wanted = model.get_submodule(name)(x, ids, weights)
        model = model.to(getattr(torch, dtype))
        assert place_experts(model, dtype, ThreadPool(1)) == 2
        got = model.get_submodule(name)(x.to(getattr(torch, dtype)), ids, weights)
    bound = 1e-5 if dtype == "float32" else 0.03
    assert float((got.float() - wanted).norm() / wanted.norm()) < bound
