"""Goal: a proof accepts what runs right, and refuses what does not, by the operator at fault.

Method: the switches of published models, shrunk. Mutants are operators that leave out one thing
that a family has; each must be refused, with its layer and name.
"""

import copy
import json
from dataclasses import replace

import msgspec
import pytest
import torch
from published import FIRST_USE, PUBLISHED, make_published
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quick import rest_slow
from tandem import _native
from tandem.cli.commands.verify import render_proof
from tandem.core.errors import UnsupportedError
from tandem.core.model.layers import Activation
from tandem.kernels import paged
from tandem.kernels.cpu.experts import PackedExperts
from tandem.kernels.cpu.linear import PANEL_COLUMNS
from tandem.kernels.interfaces import AttentionRule
from tandem.kernels.mixtures.ungated import UngatedExperts
from tandem.kernels.operators.attention import Attention
from tandem.kernels.operators.decoder_layer import DecoderLayer
from tandem.kernels.operators.experts import RoutedExperts
from tandem.kernels.operators.gated_delta import GatedDelta
from tandem.kernels.operators.linear import Embedding, LmHead
from tandem.kernels.operators.mla import MlaAttention
from tandem.kernels.operators.mlp import Mlp
from tandem.kernels.operators.moe import MoeBlock, Router
from tandem.kernels.operators.norm import LayerNorm, RmsNorm
from tandem.kernels.operators.rope import Rope
from tandem.kernels.paged import PagedKvCache
from tandem.kernels.state_space.kimi_delta import KimiDelta
from tandem.kernels.state_space.mixers import Mamba2, ShortConv
from tandem.kernels.states import StateCache
from tandem.kernels.torch import attention as torch_attention
from tandem.models.families import FAMILIES, open_checkpoint
from tandem.models.identity import IGNORED_CONFIG
from tandem.models.proof import prove, require
from tandem.models.proof.flips import HARMLESS, list_changes
from tandem.models.proof.prove import find_key, prove_config
from tandem.models.proof.shrink import shrink_config

LONG = {
    "a layer that shares a choice has another one's",
    "a LayerNorm of another epsilon",
    "biases of experts of the next",
    "bias of index keys left out",
    "neighbours for halves in an index",
    "every token is chosen",
    "a layer that shares a choice sees all tokens",
    "gemma4_text-of-26b-a4b",
    "llama-3.1",
    "llama-tied-biases",
    "llama-dynamic",
    "qwen2-windows",
    "qwen2-yarn",
    "qwen3_moe-mixed",
    "glm4_moe-groups",
    "exaone4",
    "cohere",
    "granite",
    "arcee",
    "starcoder2",
    "hy_v3",
    "phi-4-mini",
    "olmo_hybrid-rotated",
    "granitemoehybrid-dense",
    "deepseek_v2-of-236b",
    "deepseek_v2-lite",
    "cohere2",
    "exaone_moe",
    "window off by one",
    "no window",
    "no soft cap",
    "no sinks",
    "halves for neighbours",
    "another scale",
    "logits not divided",
    "norm of each head",
    "values not scaled",
    "borders of chunks crossed",
    "queries without RoPE do not grow",
    "weights of experts on their outputs",
    "a layer that shares KV reads another layer's",
    "all pairs of a head rotated",
    "factor of a layer left out",
    "scores of the input that is not normed",
    "no norm after the MLP",
    "another norm of keys",
    "norm of index keys left out",
    "heads of an index have others' weights",
    "halves for neighbours in a latent",
    "positions twice as far apart",
    "window of every layer",
    "sinks scaled like scores",
    "gate and up the other way around",
    "another head's keys",
    "norms add nothing",
    "weights not normalised",
    "all groups count",
    "weights not scaled",
    "a window on a layer of full attention",
    "gelu for a square",
    "states decay at other rates",
    "no bias of the decay",
    "updates go half as far",
    "gate of the norm without its input",
    "norm of heads left out",
    "a and b the other way around",
    "gate of the norm times its input",
    "steps as short as they come",
    "queries of latents not scaled by position",
    "norms of queries left out",
    "all of a head rotated",
    "cap before the scale",
    "one RoPE for all layers",
    "RoPE on a layer that has none",
    "queries not scaled by position",
    "norm of the latent left out",
    "halves for neighbours in an index",
    "bias of the router ignored",
    "no bias of the choice",
    "no limit in the experts",
    "shared experts left out",
    "logits not scaled",
    "convolution the other way around",
    "one norm for all groups",
    "output of attention not gated",
    "values not normed",
    "YaRN's correction of the scale left out",
    "one expert fewer",
    "factors of experts left out",
    "experts of another activation",
}
"""Cases of these tests that others stand for in a run of minutes; of mutants, another of the same
operator.
"""


def mark_slow(names):
    return [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in names]


FAMILIES_ONCE = [name for name, (model_type, _) in PUBLISHED.items() if name == model_type]
FLIPPED = {
    # Five groups of eight experts are refused, which says nothing: two are noticed.
    "deepseek_v3": {"n_group": "noticed", "topk_group": "noticed", "vocab_size": "kept"},
    "deepseek_v2-of-236b": {"topk_method": "noticed"},
    # Its first layer is dense by another field as well.
    "qwen3_moe-mixed": {"mlp_only_layers": "structural"},
    "qwen2-yarn": {"rope_parameters.rope_type": "noticed"},
    "phi-3-128k": {
        "rope_parameters.long_factor": "noticed",
        "rope_parameters.short_factor": "noticed",
        "original_max_position_embeddings": "noticed",
    },
    "llama": {"rope_parameters.rope_type": "noticed"},
}
"""What becomes of fields where the first other value tells nothing."""
# Fields of a second model of a family are those of the first, but where it is said.
WITH_FLIPS = [name for name in PUBLISHED if name in FAMILIES_ONCE or name in FLIPPED]
QUICK_FLIPS = ["llama", "gpt_oss", "deepseek_v3", "qwen3_next"]
"""Families whose switches `make test` changes one by one: of attention, experts, latents, states.
It proves the others without.
"""


@pytest.mark.parametrize(
    "name", mark_slow([n for n in (*PUBLISHED, *FIRST_USE) if n not in QUICK_FLIPS])
)
def test_families_are_proved(name):
    """Each family of the page runs right."""
    check_proof(prove_config(make_published(name), with_flips=False))


@pytest.mark.parametrize("name", rest_slow(QUICK_FLIPS, WITH_FLIPS))
def test_families_are_proved_with_each_switch(name):
    """A family runs right, and the tiny model tells each of its switches."""
    proof = prove_config(make_published(name))
    check_proof(proof)
    outcomes = {flip.field: flip.outcome for flip in proof.flips}
    assert "noticed" in outcomes.values()
    assert FLIPPED.get(name, {}).items() <= outcomes.items()
    assert all(flip.change for flip in proof.flips)
    assert "proved" in render_proof(proof)
    assert "field vocab_size not changed: it has a row" in render_proof(proof)


def check_proof(proof):
    assert proof.problem == ""
    assert {check.name for check in proof.checks} >= {"whole", "decoding", "reused prefix"}


def test_every_family_of_the_page_is_among_the_published():
    """``FAMILIES`` promises that CI proves them."""
    same_classes = {"kimi_k2": "deepseek_v3"}
    published = {model_type for model_type, _ in PUBLISHED.values()}
    assert {same_classes.get(name, name) for name in FAMILIES} == published


def forget(kind, name, value):
    """Return a mutation: every operator of a class forgets what it was told."""

    def mutate(monkeypatch):
        original = kind.__init__

        def init(self, *args, **kwargs):
            original(self, *args, **kwargs)
            setattr(self, name, value(self) if callable(value) else value)

        monkeypatch.setattr(kind, "__init__", init)

    return mutate


def respec(kind, **changes):
    """Return a mutation: every operator of a class is built of another spec."""

    def change(operator):
        made = {
            key: value(operator) if callable(value) else value for key, value in changes.items()
        }
        return msgspec.structs.replace(operator.spec, **made)

    return forget(kind, "spec", change)


def reroute(**changes):
    """Return a mutation: every router has another rule."""
    return forget(Router, "rule", lambda router: msgspec.structs.replace(router.rule, **changes))


def spoil(kind, change):
    """Return a mutation: every operator of a class is changed once its weights are there."""

    def mutate(monkeypatch):
        original = kind.load

        def load(self, reader, name):
            original(self, reader, name)
            change(self)

        monkeypatch.setattr(kind, "load", load)

    return mutate


def wrap(kind, name, change):
    """Return a mutation: a method's result, or its arguments, become ``change``'s."""

    def mutate(monkeypatch):
        original = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *args, **kwargs: change(original, *args, **kwargs))

    return mutate


def set_rule(**changes):
    """Return what changes the rule of an attention that has one."""

    def change(attention):
        rule = attention.rule
        made = {field: make(attention) for field, make in changes.items() if getattr(rule, field)}
        attention.rule = replace(rule, **made)

    return change


def set_buffer(name, change):
    """Return what changes a buffer's values in place, where there is one."""

    def spoil_buffer(operator):
        buffer = getattr(operator, name)
        if buffer is not None:
            buffer.tensor.copy_(change(buffer.tensor.clone()))

    return spoil_buffer


def leave_out(part):
    """Return what takes a part out of a layer."""
    return forget(DecoderLayer, "parts", lambda layer: layer.parts._replace(**{part: None}))


def set_sinks(change):
    """Return what gives each head another sink."""
    return spoil(Attention, lambda a: a.rule.sinks.tensor.copy_(change(a, a.sinks.clone())))


def take_keys_of_another_head(attention):
    """Roll keys and values by a head, in a matrix of f32: value[K][64 outputs] by panel."""
    matrix, first = attention.qkv_matrix, attention.spec.num_heads * attention.spec.head_dim
    panels = torch.from_numpy(matrix.packed).view(torch.float32)
    rows = panels.view(-1, matrix.in_features, PANEL_COLUMNS).transpose(1, 2)
    weight = rows.reshape(-1, matrix.in_features)[: matrix.out_features].clone()
    weight[first:] = weight[first:].roll(attention.spec.head_dim, 0)
    matrix.pack_rows(0, weight)


def change_rule(kind=GatedDelta, **changes):
    """Return a mutation: the rule of every mixer with a state is made with other values."""

    def change(layer):
        rule = copy.copy(layer.rule)
        rule.__dict__.pop("native", None)
        for name, value in changes.items():
            setattr(rule, name, value(rule))
        layer.rule = rule

    return spoil(kind, change)


def skip_sigmoid(original, gate, out, activation, *others, **options):
    """Run gated activations, but those of attention's outputs."""
    if activation != "sigmoid":
        original(gate, out, activation, *others, **options)


def set_index(change):
    """Return what changes the index of an attention that has one."""
    return lambda attention: None if attention.index is None else change(attention.index)


def respec_index(**changes):
    """Return a mutation: the index of every attention that has one is of another spec."""

    def change(attention):
        index = attention.spec.index
        return None if index is None else msgspec.structs.replace(index, **changes)

    return respec(MlaAttention, index=change)


def roll_weights(index):
    """Give each head of an index the weight of the one before."""
    matrix = index.weight_matrix
    matrix.pack_rows(0, matrix.unpack().roll(1, 0))


def choose_once(monkeypatch):
    """Let the first layer of a step that has an index choose for all later ones."""
    original, chosen = _native.PlannedAttention.choose, []

    def choose(plan, *given):
        if not any(plan is held for held in chosen):
            chosen.append(plan)
            original(plan, *given)

    monkeypatch.setattr(_native.PlannedAttention, "choose", choose)


MUTANTS = {
    "no norm after attention": ("gemma2", leave_out("attention_out_norm"), "0 (DecoderLayer)"),
    "no norm after the MLP": ("glm4", leave_out("mlp_out_norm"), "layers.0 (DecoderLayer)"),
    "norms of queries left out": (
        "qwen3",
        spoil(Attention, lambda a: setattr(a, "held_q", None)),
        "layers.0.self_attn (Attention)",
    ),
    "another norm of keys": (
        "minimax_m2",
        spoil(Attention, set_buffer("held_k", lambda w: w.flip(0))),
        "layers.0.self_attn (Attention)",
    ),
    "norm of the latent left out": (
        "deepseek_v3",
        spoil(MlaAttention, set_buffer("held_kv_norm", torch.ones_like)),
        "layers.0.self_attn (MlaAttention)",
    ),
    "norm of index keys left out": (
        "glm_moe_dsa",
        spoil(MlaAttention, set_index(lambda index: index.norm.fill_(1.0))),
        "layers.0.self_attn (MlaAttention)",
    ),
    "bias of index keys left out": (
        "deepseek_v32",
        spoil(MlaAttention, set_index(lambda index: index.bias.zero_())),
        "layers.0.self_attn (MlaAttention)",
    ),
    "neighbours for halves in an index": (
        "deepseek_v32",
        respec_index(is_interleaved=True),
        "layers.0.self_attn (MlaAttention)",
    ),
    "halves for neighbours in an index": (
        "glm_moe_dsa",
        respec_index(is_interleaved=False),
        "layers.0.self_attn (MlaAttention)",
    ),
    "one token fewer is chosen": (
        "deepseek_v32",
        respec(MlaAttention, top=lambda a: a.spec.top - 1),
        "layers.0.self_attn (MlaAttention)",
    ),
    "every token is chosen": (
        "glm_moe_dsa",
        respec(MlaAttention, top=1000),
        "layers.0.self_attn (MlaAttention)",
    ),
    "heads of an index have others' weights": (
        "glm_moe_dsa",
        spoil(MlaAttention, set_index(roll_weights)),
        "layers.0.self_attn (MlaAttention)",
    ),
    "a layer that shares a choice sees all tokens": (
        "glm_moe_dsa",
        respec(MlaAttention, top=lambda a: a.spec.top if a.spec.index else 0),
        "self_attn (MlaAttention)",
    ),
    "a layer that shares a choice has another one's": (
        "glm_moe_dsa",
        choose_once,
        "no operator alone",
    ),
    "halves for neighbours in a latent": (
        "deepseek_v3",
        respec(MlaAttention, is_interleaved=False),
        "layers.0.self_attn (MlaAttention)",
    ),
    "YaRN's correction of the scale left out": (
        "deepseek_v3",
        respec(MlaAttention, scale=lambda a: a.spec.head**-0.5),
        "layers.0.self_attn (MlaAttention)",
    ),
    "neighbours for halves": (
        "llama",
        respec(Attention, interleaved_size=lambda a: a.spec.head_dim),
        "layers.0.self_attn (Attention)",
    ),
    "all of a head rotated": (
        "phi-4-mini",
        wrap(
            Rope,
            "compute",
            lambda original, rope, positions, dtype: tuple(
                torch.cat((part, part[..., -4:]), -1) for part in original(rope, positions, dtype)
            ),
        ),
        "layers.0.self_attn (Attention)",
    ),
    "positions twice as far apart": (
        "qwen2",
        wrap(Rope, "compute", lambda original, rope, p, dtype: original(rope, 2 * p, dtype)),
        "layers.0.self_attn (Attention)",
    ),
    "window one short": (
        "gpt_oss",
        spoil(Attention, set_rule(window=lambda a: a.rule.window - 1)),
        "self_attn (Attention)",
    ),
    "window of every layer": (
        "gemma2",
        spoil(Attention, lambda a: setattr(a, "rule", replace(a.rule, window=11))),
        "layers.1.self_attn (Attention)",
    ),
    "cap before the scale": (
        "gemma2",
        spoil(Attention, set_rule(soft_cap=lambda a: a.rule.soft_cap * a.spec.scale)),
        "layers.0.self_attn (Attention)",
    ),
    "sinks of other heads": (
        "gpt_oss",
        set_sinks(lambda a, s: s.roll(1)),
        "layers.0.self_attn (Attention)",
    ),
    "sinks scaled like scores": (
        "gpt_oss",
        set_sinks(lambda a, s: s * a.spec.scale),
        "layers.0.self_attn (Attention)",
    ),
    "no sinks": (
        "gpt_oss",
        spoil(Attention, lambda a: setattr(a, "rule", replace(a.rule, sinks=None))),
        "layers.0.self_attn (Attention)",
    ),
    "bias of the router ignored": (
        "gpt_oss",
        spoil(Router, lambda r: r.matrix.set_bias(torch.zeros(r.num_experts))),
        "layers.0.mlp.router (Router)",
    ),
    "bias of the choice ignored": (
        "deepseek_v3",
        spoil(Router, lambda r: setattr(r, "choice_bias", None)),
        "layers.1.mlp.gate (Router)",
    ),
    "groups by their best expert alone": (
        "deepseek_v3",
        reroute(num_group_choices=1),
        "layers.1.mlp.gate (Router)",
    ),
    "one expert fewer": (
        "qwen3_moe",
        forget(Router, "top_k", lambda r: r.top_k - 1),
        "of the shape of weights",  # Choices of all layers have one shape.
    ),
    "biases of experts of the next": (
        "gpt_oss",
        wrap(
            PackedExperts,
            "set_bias",
            lambda original, e, i, *biases: original(e, (i + 1) % e.num_experts, *biases),
        ),
        "layers.0.mlp.experts (NativeExperts)",
    ),
    "gate and up the other way around": (
        "olmoe",
        wrap(
            PackedExperts,
            "pack_expert",
            lambda original, e, i, gate, up, down: original(e, i, up, gate, down),
        ),
        "layers.0.mlp.experts (NativeExperts)",
    ),
    "no limit in the experts": (
        "gpt_oss",
        wrap(
            PackedExperts,
            "__init__",
            lambda original, e, *sizes, activation, **options: original(
                e, *sizes, activation=msgspec.structs.replace(activation, limit=100.0), **options
            ),
        ),
        "layers.0.mlp.experts (NativeExperts)",
    ),
    "shared experts left out": (
        "deepseek_v2",
        forget(MoeBlock, "_shared", None),
        "layers.0.mlp (MoeBlock)",
    ),
    "another head's keys": (
        "llama",
        spoil(Attention, take_keys_of_another_head),
        "layers.0.self_attn (Attention)",
    ),
    "another epsilon": ("olmoe", forget(RmsNorm, "eps", 0.1), "input_layernorm"),
    "norms add nothing": ("gemma2", forget(RmsNorm, "offset", 0.0), "layernorm (RmsNorm)"),
    "no window": (
        "mistral",
        forget(Attention, "rule", lambda a: replace(a.rule, window=0)),
        "self_attn (Attention)",
    ),
    "window off by one": (
        "gemma3_text",
        forget(Attention, "rule", lambda a: replace(a.rule, window=a.rule.window and 12)),
        "self_attn (Attention)",
    ),
    "no soft cap": (
        "gemma2",
        forget(Attention, "rule", lambda a: replace(a.rule, soft_cap=0.0)),
        "self_attn (Attention)",
    ),
    "no cap on logits": ("gemma2", forget(LmHead, "soft_cap", 0.0), "lm_head (LmHead)"),
    "no embedding scale": ("gemma3_text", forget(Embedding, "scale", 1.0), "embed_tokens"),
    "another scale": ("gemma2", respec(Attention, scale=0.2), "self_attn (Attention)"),
    "another activation": ("gemma2", forget(Mlp, "activation", Activation()), "mlp (Mlp)"),
    "halves for neighbours": ("glm4", respec(Attention, interleaved_size=0), "self_attn"),
    "one RoPE for all layers": ("gemma3_text", respec(Attention, rope_idx=0), "self_attn"),
    "norm of each head": (
        "qwen3",
        respec(Attention, qk_norm=lambda a: msgspec.structs.replace(a.spec.qk_norm, offset=1.0)),
        "self_attn (Attention)",
    ),
    "weights not normalised": (
        "mixtral",
        reroute(is_normalised=False),
        "mlp.gate (Router)",
    ),
    "all groups count": (
        "glm4_moe-groups",
        reroute(num_groups=1, num_top_groups=1),
        "mlp.gate (Router)",
    ),
    "weights not scaled": (
        "glm4_moe",
        reroute(weight_scale=1.0),
        "mlp.gate (Router)",
    ),
    "no bias of the choice": (
        "minimax_m2",
        respec(Router, choice_bias=""),
        "e_score_correction_bias' in model.safetensors belongs to no module",
    ),
    "RoPE on a layer that has none": ("smollm3", respec(Attention, rope_idx=0), "self_attn"),
    "a window on a layer of full attention": (
        "exaone4",
        forget(Attention, "rule", AttentionRule(3)),
        "self_attn",
    ),
    "queries not scaled by position": (
        "ministral3",
        respec(Attention, position_scale=None),
        "self_attn (Attention)",
    ),
    "logits not scaled": ("cohere", forget(LmHead, "scale", 1.0), "lm_head (LmHead)"),
    "logits not divided": ("granite", forget(LmHead, "scale", 1.0), "lm_head (LmHead)"),
    "gelu for a square": ("arcee", forget(Mlp, "activation", Activation("gelu")), "mlp (Mlp)"),
    "a LayerNorm of another epsilon": (
        "starcoder2",
        respec(LayerNorm, eps=0.5),
        "(LayerNorm)",
    ),
    "shared expert not gated": (
        "qwen2_moe",
        forget(MoeBlock, "_shared_gate", None),
        "mlp (MoeBlock)",
    ),
    "convolution the other way around": (
        "qwen3_next",
        change_rule(conv_WC=lambda rule: rule.conv_WC.flip(0)),
        "layers.0.linear_attn (GatedDelta)",
    ),
    "states decay at other rates": (
        "qwen3_5_text",
        change_rule(decay_rate_V=lambda rule: rule.decay_rate_V * 1.1),
        "layers.0.linear_attn (GatedDelta)",
    ),
    "no bias of the decay": (
        "olmo_hybrid",
        change_rule(decay_bias_Vd=lambda rule: rule.decay_bias_Vd * 0),
        "layers.0.linear_attn (GatedDelta)",
    ),
    "updates go half as far": (
        "olmo_hybrid",
        change_rule(beta_scale=lambda rule: 1.0),
        "layers.0.linear_attn (GatedDelta)",
    ),
    "gate of the norm without its input": (
        "qwen3_next",
        change_rule(gate=lambda rule: "sigmoid"),
        "layers.0.linear_attn (GatedDelta)",
    ),
    "norm of heads left out": (
        "qwen3_5_moe_text",
        change_rule(norm_v=lambda rule: torch.ones_like(rule.norm_v)),
        "layers.0.linear_attn (GatedDelta)",
    ),
    "rows as the checkpoint has them": (
        "qwen3_next",
        respec(GatedDelta, is_by_key_head=False),
        "layers.0.linear_attn (GatedDelta)",
    ),
    "a and b the other way around": (
        "qwen3_5_text",
        respec(GatedDelta, ba_names=lambda g: g.spec.ba_names[::-1]),
        "layers.0.linear_attn (GatedDelta)",
    ),
    "items of a key decay as their neighbours": (
        "kimi_linear",
        change_rule(KimiDelta, decay_bias_Vd=lambda rule: rule.decay_bias_Vd.roll(1)),
        "layers.0.self_attn (KimiDelta)",
    ),
    "gate of the norm times its input": (
        "kimi_linear",
        change_rule(KimiDelta, gate=lambda rule: "silu"),
        "layers.0.self_attn (KimiDelta)",
    ),
    "products of the future": (
        "lfm2",
        change_rule(ShortConv, conv_WC=lambda rule: rule.conv_WC.flip(0)),
        "layers.0.conv (ShortConv)",
    ),
    "no skip past the state": (
        "bamba",
        change_rule(Mamba2, skip_H=lambda rule: rule.skip_H * 0),
        "layers.0.mamba (Mamba2)",
    ),
    "steps as short as they come": (
        "nemotron_h",
        change_rule(Mamba2, dt_limits=lambda rule: (0.0, rule.dt_limits[1])),
        "layers.0.mixer (Mamba2)",
    ),
    "one norm for all groups": (
        "granitemoehybrid-dense",
        change_rule(Mamba2, norm_HP=lambda rule: rule.norm_HP.roll(rule.num_values // 2)),
        "layers.0.mamba (Mamba2)",
    ),
    "experts of another activation": (
        "nemotron_h-latents",
        forget(UngatedExperts, "activation", Activation("silu")),
        "a module that the skeleton computes",
    ),
    "output of attention not gated": (
        "qwen3_next",
        wrap(_native, "gate", skip_sigmoid),
        "self_attn (Attention)",
    ),
    "a layer that shares KV reads another layer's": (
        "gemma4_text",
        forget(Attention, "layer_idx", lambda a: a.layer_idx - (2 if a.layer_idx > 2 else 0)),
        "self_attn (Attention)",
    ),
    "values not scaled": (
        "mimo_v2_flash",
        respec(Attention, value_scale=1.0),
        "self_attn (Attention)",
    ),
    "queries of latents not scaled by position": (
        "mistral4",
        respec(MlaAttention, position_scale=None),
        "self_attn (MlaAttention)",
    ),
    "borders of chunks crossed": (
        "llama4_text",
        forget(Attention, "rule", lambda a: replace(a.rule, chunk=0)),
        "self_attn (Attention)",
    ),
    "chunks of another size": (
        "llama4_text",
        forget(Attention, "rule", lambda a: replace(a.rule, chunk=a.rule.chunk and 12)),
        "self_attn (Attention)",
    ),
    "queries without RoPE do not grow": (
        "llama4_text",
        respec(Attention, position_scale=None),
        "self_attn (Attention)",
    ),
    "weights of experts on their outputs": (
        "llama4_text",
        respec(RoutedExperts, scales_input=False),
        "feed_forward",
    ),
    "values not normed": (
        "gemma4_text",
        spoil(Attention, lambda a: setattr(a, "held_v", None)),
        "self_attn (Attention)",
    ),
    "all pairs of a head rotated": (
        "gemma4_unified_text",
        forget(Rope, "inv_freq", lambda rope: rope.inv_freq.clamp(min=1e-3)),
        "operator Rope cannot take model.rotary_emb",
    ),
    "factor of a layer left out": (
        "gemma4_unified_text",
        spoil(DecoderLayer, lambda layer: layer.scale_1.fill_(1.0)),
        "(DecoderLayer)",
    ),
    "factors of experts left out": (
        "gemma4_text-of-26b-a4b",
        respec(Router, has_expert_scale=False),
        "per_expert_scale' in model.safetensors belongs to no module",
    ),
    "scores of an input whose norm has another epsilon": (
        "gemma4_text-of-26b-a4b",
        respec(Router, norm_eps=0.5),
        "whole",
    ),
    "angles of another base": (
        "llama",
        forget(Rope, "inv_freq", lambda rope: rope.inv_freq * 1.01),
        "operator Rope cannot take model.rotary_emb",
    ),
}


@pytest.mark.parametrize("mutant", mark_slow(MUTANTS))
def test_a_wrong_operator_is_refused_by_name(mutant, monkeypatch):
    """A proof that accepts a mutant is worth nothing."""
    name, mutate, where = MUTANTS[mutant]
    mutate(monkeypatch)
    monkeypatch.setattr(prove, "SEEDS", (0,))  # The others only take time where all must fail.
    proof = prove_config(make_published(name), with_flips=False)
    assert where in proof.problem
    assert "NOT proved" in render_proof(proof)


RULED = [
    "glm_moe_dsa",
    "gemma2",
    "gemma3_text",
    "gemma4_unified_text",
    "gpt_oss",
    "mistral",
    "minimax_m2",
    "deepseek_v3",
    "qwen3_next",
]


@pytest.mark.parametrize("name", rest_slow(["gpt_oss", "deepseek_v3"], RULED))
def test_torch_attention_is_proved_too(name, monkeypatch):
    """Windows, caps, sinks and latents, where there is no native attention: not on the CPU."""
    monkeypatch.setattr(paged, "is_native", lambda tensor: False)
    proof = prove_config(make_published(name), with_flips=False)
    assert proof.problem == ""


def test_a_wrong_torch_attention_is_refused(monkeypatch):
    """The proof runs the attention that it is said to run."""
    monkeypatch.setattr(paged, "is_native", lambda tensor: False)
    monkeypatch.setattr(torch_attention, "_cap", lambda scores, cap: scores)
    monkeypatch.setattr(prove, "SEEDS", (0,))
    problem = prove_config(make_published("gemma2"), with_flips=False).problem
    assert "layers.0.self_attn (Attention)" in problem


FED_WRONGLY = {
    "a block copied too short": (
        wrap(PagedKvCache, "copy_block", lambda f, cache, a, b, n: f(cache, a, b, n - 1)),
        "reused prefix",
        "qwen3",
    ),
    "a state not copied": (
        wrap(StateCache, "copy", lambda f, cache, source, target: None),
        "reused prefix",
        "qwen3_next",
    ),
    "a state that begins with another's": (
        wrap(StateCache, "clear", lambda f, cache, slot: None),
        "chunked",
        "qwen3_5_text",
    ),
}


@pytest.mark.parametrize("mutant", FED_WRONGLY)
def test_wrong_feeding_is_refused_as_such(mutant, monkeypatch):
    """Where each operator alone is right, the refusal says how the tokens were fed."""
    mutate, feed, name = FED_WRONGLY[mutant]
    mutate(monkeypatch)
    monkeypatch.setattr(prove, "SEEDS", (0,))
    problem = prove_config(make_published(name), with_flips=False).problem
    assert problem.startswith(feed)
    assert "no operator alone" in problem


SWITCHED = {
    "gemma3_text": {"attn_logit_softcapping": 5.0},
    "gemma2": {"use_bidirectional_attention": True},
}


@pytest.mark.parametrize("name", SWITCHED)
def test_a_switch_that_no_operator_has_is_refused(name):
    """Either the logits differ, or the tiny model cannot tell: no third way to be accepted."""
    assert prove_config(make_published(name, **SWITCHED[name])).problem


HIDDEN = {
    # Shown by larger values only, as the divisor that it guards is never so small.
    "ernie4_5_moe": ("moe_norm_min", "noticed"),
    # Each layer has a number of its own.
    "laguna": ("num_attention_heads", "unread"),
    "granite_swa": ("rope_parameters.rope_theta", "unread"),
    "phimoe": ("num_experts_per_tok", "harmless"),
    "apertus": ("max_position_embeddings", "harmless"),
}


@pytest.mark.parametrize("name", rest_slow(["ernie4_5_moe"], HIDDEN))
def test_a_switch_that_one_tiny_model_hides_does_not_refuse_a_family(name):
    """Another one shows it, or it cannot matter."""
    proof = prove_config(CONFIG_MAPPING[name]())
    assert proof.problem == ""
    assert HIDDEN[name] in {(flip.field, flip.outcome) for flip in proof.flips}


def test_what_the_first_tiny_model_does_not_tell_is_tried_on_others(monkeypatch):
    """Here the first tells nothing; another one whose changes are all unseen is no proof."""
    tell, told = prove.flip_fields, []

    def hide(config, state, references, *, fields=None, **others):
        told.append(fields)
        flips = tell(config, state, references, fields=fields, **others)
        if fields is not None:
            return flips
        return tuple(msgspec.structs.replace(flip, outcome="unnoticed") for flip in flips)

    monkeypatch.setattr(prove, "flip_fields", hide)
    proof = prove_config(make_published("llama", num_hidden_layers=2))
    assert "does not tell a change of" in proof.problem
    assert "rms_norm_eps" not in proof.problem
    assert told[0] is None
    assert "rms_norm_eps" in told[1]
    assert "rms_norm_eps" not in told[2]


def test_a_tiny_configuration_keeps_every_kind_of_layer():
    """Kinds that come late in the real model must be in the tiny one."""
    tiny = shrink_config(make_published("gemma3_text"))
    assert set(tiny.layer_types) == {"sliding_attention", "full_attention"}
    assert tiny.sliding_window < 16
    mixed = shrink_config(make_published("glm4_moe"))
    assert 0 < mixed.first_k_dense_replace < mixed.num_hidden_layers
    grouped = shrink_config(make_published("glm4_moe-groups"))
    assert (grouped.n_group, grouped.topk_group) == (4, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES_ONCE)
def test_a_changed_field_is_followed_or_refused(name, monkeypatch):
    """What ``auto`` trusts: no field of a family that CI proves changes values unseen.

    Whatever the gate and the builders accept must be right; what they refuse is refused at load.
    """
    tiny = shrink_config(make_published(name))
    values = tiny.to_dict()
    unset = [f for f, v in values.items() if v is None and f not in IGNORED_CONFIG]
    changes = [(f, str(v), {**values, f: v}) for f in unset for v in (0.7, 5, True)]
    for field, change, changed in [*list_changes(tiny), *changes]:
        if field.partition(".")[0] in IGNORED_CONFIG or field in HARMLESS:
            continue
        try:
            config = type(tiny).from_dict(changed)
        except Exception:
            continue
        for seed in (0, 1):  # A near tie of one model is none of another; what is wrong stays so.
            monkeypatch.setattr(prove, "SEEDS", (seed,))
            problem = prove_config(config, with_flips=False).problem
            is_wrong = "first differs" in problem or problem.startswith("true head sizes")
            if not is_wrong:
                break
        assert not is_wrong, (field, change, problem)


@pytest.fixture
def save_config(tmp_path):
    def save(model_type, **changes):
        config = CONFIG_MAPPING[model_type](**changes)
        folder = tmp_path / model_type
        config.save_pretrained(folder)
        return folder

    return save


def test_an_unknown_architecture_is_proved_once(save_config, tmp_path, monkeypatch):
    """The first use proves; the next one reads what the first found, and believes only its own."""
    assert "olmo2" not in FAMILIES
    folder, root = save_config("olmo2"), tmp_path / "proofs"
    proof = require.require_proof(folder, root=root)
    assert proof is not None
    assert proof.is_proved

    def fail(config):
        raise AssertionError(config)

    monkeypatch.setattr(require, "prove_config", fail)
    assert require.require_proof(folder, root=root) == proof
    assert require.require_proof(folder, "off", root=root) is None
    (path,) = root.iterdir()
    path.chmod(0o666)
    with pytest.raises(AssertionError):
        require.require_proof(folder, root=root)
    path.chmod(0o600)
    path.write_text(json.dumps({**json.loads(path.read_text()), "key": "another"}))
    with pytest.raises(AssertionError):
        require.require_proof(folder, root=root)


def test_an_architecture_that_differs_is_refused_where_it_does(save_config, tmp_path):
    """MiniCPM3 scales and places what its latent attention rotates otherwise."""
    with pytest.raises(UnsupportedError, match=r"self_attn \(MlaAttention\)") as caught:
        require.require_proof(save_config("minicpm3"), root=tmp_path / "proofs")
    assert caught.value.field == "model_type"


def test_families_of_ci_are_trusted_with_its_transformers_alone(save_config, tmp_path, monkeypatch):
    """Another version of transformers may compute another thing under the same name."""
    import transformers

    folder, root = save_config("qwen2", hidden_size=64), tmp_path / "proofs"
    assert require.require_proof(folder, root=root) is None
    monkeypatch.setattr(transformers, "__version__", "5.99.0")
    assert require.require_proof(folder, root=root) is not None


def test_the_key_is_of_switches_not_of_sizes():
    """Sizes of one family share a proof; a switch does not."""
    small, large = (make_published("qwen2", num_hidden_layers=n) for n in (24, 48))
    assert find_key(small) == find_key(large)
    assert find_key(make_published("qwen2", tie_word_embeddings=False)) != find_key(small)


REFUSED = {
    "mamba2": ({"model_type": "mamba2"}, "model_type", "state-space"),
    "jamba": ({"model_type": "jamba"}, "model_type", "beside KV"),
    "layers": (
        {"model_type": "llama", "layer_types": ["linear_attention", "full_attention"]},
        "layer_types",
        "linear_attention",
    ),
    "fields": ({"model_type": "falcon_h1", "mamba_d_ssm": 64}, "mamba_d_ssm", "beside KV"),
    "images": ({"model_type": "gemma3", "vision_config": {"a": 1}}, "vision_config", "images"),
    "encoder": ({"model_type": "t5", "is_encoder_decoder": True}, "is_encoder_decoder", "encoder"),
    "one layer's own": (
        {"model_type": "llama", "per_layer_config": {"1": {"skip": ["attention"]}}},
        "per_layer_config",
        "from layer to layer",
    ),
    "layers without rotation": (
        {
            "model_type": "qwen3",
            "rope_parameters": {
                "full_attention": None,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        "rope_parameters.full_attention",
        "without rotation",
    ),
    "index": ({"model_type": "hy_v4", "index_topk": 64}, "index_topk", "index"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_keeps_more_than_kv_is_refused_by_name(name, tmp_path):
    """A prefix hit without the state beside KV would give wrong tokens."""
    raw, field, text = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedError, match=text) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.field == field


def test_a_proof_leaves_torch_as_it_was():
    """It runs inside a server that has settings of its own."""
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    prove_config(make_published("llama"), with_flips=False)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads
