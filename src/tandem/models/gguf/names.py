"""Which tensors of a GGUF file a weight of the skeleton is made of, and how.

llama.cpp's names are ``blk.LAYER.PART.weight``. Where its converter rearranged a weight, a
``Recipe`` says what to undo: rows of q and k of ``llama``, whose rotation pairs neighbours there;
norms of Gemma, which hold ``1 + weight``; gate and up, in tensors apart; the compressed values of
MLA, in tensors by use.
"""

import re
from collections.abc import Container
from dataclasses import dataclass
from enum import Enum, auto

__all__ = ["HARMLESS", "How", "Recipe", "find_recipe"]


class How(Enum):
    """What makes the weight of the skeleton out of the tensors of the file."""

    PLAIN = auto()
    """The tensors one below the other; of experts, along their outputs."""
    UNPERMUTE = auto()
    """Rows of a head: pairs of neighbours become the two halves."""
    MINUS_ONE = auto()
    """The file holds 1 + weight."""
    INTERLEAVE = auto()
    """gpt-oss: experts with inputs first, columns of the two tensors in turn."""
    TRANSPOSE = auto()
    """gpt-oss: experts with inputs first."""
    JOIN_KV = auto()
    """MLA: keys [H, latent, d] and values [H, d, latent] become [H * (d + d), latent]."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make a weight."""

    tensors: tuple[str, ...]
    how: How = How.PLAIN


HARMLESS = {
    r"^rope_freqs\.weight$": "factors of RoPE frequencies, which are read from the configuration",
    r"^rope_factors_(long|short)\.weight$": "factors of RoPE frequencies, of the configuration",
    r"^blk\.\d+\.attn_rot_embd$": "RoPE frequencies, which are computed from the configuration",
    r"^blk\.\d+\.nextn\.": "of a layer that predicts a further token, which is not run",
}
"""Tensors that no weight of the skeleton is made of, as patterns, and why."""

TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}

LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{
        f"mlp.{shared}.{part}_proj": f"ffn_{part}_shexp"
        for shared in ("shared_expert", "shared_experts")
        for part in ("gate", "up", "down")
    },
}
"""Modules of a layer; ``.weight`` and ``.bias`` follow on both sides."""

SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GLM4 = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}
SECOND_NORM = {"post_attention_layernorm": "post_attention_norm"}

SPECIAL = {
    "gemma2": SANDWICH,
    "gemma3": SANDWICH,
    "glm4": GLM4,
    "glm4moe": SECOND_NORM,
    "gpt-oss": SECOND_NORM,
}
"""Where an architecture calls a module otherwise."""

LAYER_PATTERN = re.compile(r"model\.layers\.(\d+)\.(.+)")


def find_recipe(architecture: str, name: str, tensors: Container[str]) -> Recipe | None:
    """Return what a weight is made of; None if the file has not all of it.

    Args:
        architecture: as the file calls it.
        name: of the weight in the skeleton.
        tensors: those of the file.
    """
    recipe = _find(architecture, name, tensors)
    return recipe if recipe is not None and all(t in tensors for t in recipe.tensors) else None


def _find(architecture: str, name: str, tensors: Container[str]) -> Recipe | None:
    if name in TOP:
        top = TOP[name]
        # A tied head may be asked for by its own name: its codes are the embedding's.
        if top == "output.weight" and top not in tensors:
            top = TOP["model.embed_tokens.weight"]
        return _choose(architecture, name, top)
    match = LAYER_PATTERN.fullmatch(name)
    if match is None:
        return None
    layer, rest = f"blk.{match[1]}.", match[2]
    for find in (_find_experts, _find_extra):
        recipe = find(architecture, layer, rest, tensors)
        if recipe is not None:
            return recipe
    module, _, kind = rest.rpartition(".")
    part = SPECIAL.get(architecture, {}).get(module, LAYER.get(module))
    if part is None or kind not in ("weight", "bias"):
        return None
    return _choose(architecture, name, f"{layer}{part}.{kind}")


def _choose(architecture: str, name: str, tensor: str) -> Recipe:
    if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
        return Recipe((tensor,), How.UNPERMUTE)
    if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        return Recipe((tensor,), How.MINUS_ONE)
    return Recipe((tensor,))


def _find_experts(
    architecture: str, layer: str, rest: str, tensors: Container[str]
) -> Recipe | None:
    """Routed experts: those of a layer are one tensor here, for each of gate, up and down."""
    part = rest.removeprefix("mlp.experts.")
    if part == rest:
        return None
    ending = "bias" if part.endswith("_bias") else "weight"
    gate, up, down = (f"{layer}ffn_{w}_exps.{ending}" for w in ("gate", "up", "down"))
    is_gpt_oss = architecture == "gpt-oss"
    match part.removesuffix("_bias"):
        case "gate_up_proj":
            merged = f"{layer}ffn_gate_up_exps.{ending}"
            if merged in tensors and not is_gpt_oss:
                return Recipe((merged,))
            return Recipe((gate, up), How.INTERLEAVE if is_gpt_oss else How.PLAIN)
        case "down_proj":
            is_turned = is_gpt_oss and ending == "weight"
            return Recipe((down,), How.TRANSPOSE if is_turned else How.PLAIN)
        case _:
            return None


def _find_extra(architecture: str, layer: str, rest: str, tensors: Container[str]) -> Recipe | None:
    del architecture
    if rest == "self_attn.sinks":
        return Recipe((f"{layer}attn_sinks.weight",))
    if rest in ("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"):
        return Recipe((f"{layer}exp_probs_b.bias",))
    split = (f"{layer}attn_k_b.weight", f"{layer}attn_v_b.weight")
    if rest == "self_attn.kv_b_proj.weight" and split[0] in tensors:
        return Recipe(split, How.JOIN_KV)
    return None
