"""Recipes that make a weight of the skeleton from tensors of a GGUF file.

llama.cpp's names are ``blk.LAYER.PART.weight``. If its converter rearranged a weight, a ``Recipe``
tells how to undo that: rows of q and k of ``llama``, whose RoPE pairs neighbours in the file;
Gemma's norms, which are stored as ``1 + weight``; gate and up in separate tensors; MLA's compressed
matrices, split by use; weights of layers with a state (``states``). A vector or a convolution may
have additional dimensions of size 1 in the file or in the skeleton.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from tandem.models.gguf.states import STATE_ARCHITECTURES, StateSizes

__all__ = ["COPIES", "HARMLESS", "How", "Recipe", "list_noted", "make_recipes"]


class How(Enum):
    """Operation that makes a weight of the skeleton from tensors of the file."""

    PLAIN = auto()
    """Concatenate the tensors by rows; experts along their outputs."""
    UNPERMUTE = auto()
    """Reorder the rows of each head: pairs of neighbours become the two halves."""
    MINUS_ONE = auto()
    """Subtract 1: the file stores 1 + weight."""
    INTERLEAVE = auto()
    """For gpt-oss: experts with inputs first, columns of the two tensors alternating."""
    TRANSPOSE = auto()
    """For gpt-oss and Llama 4: experts with inputs first, tensors side by side."""
    ORDERED = auto()
    """Concatenate the tensors by rows, with rows in ``Recipe.order``."""
    TURNED_INPUTS = auto()
    """Reorder the inputs (columns) of each output by ``Recipe.order``."""
    LOG_RATE = auto()
    """Take the logarithm: the file stores -exp(weight), in ``Recipe.order``."""
    FLAT = auto()
    """One tensor that may have other dimensions of size 1, or whose rows form a vector."""
    STACKED = auto()
    """Concatenate tensors of equal size, each a share of the rows."""
    JOIN_KV = auto()
    """For MLA: keys [H, latent, d] and values [H, d, latent] become [H * (d + d), latent]."""
    NOTED = auto()
    """No tensor: numbers of the metadata, in ``Recipe.values``."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The making of a weight of the skeleton: from which of the file's tensors, by which
    operation.
    """

    tensors: tuple[str, ...]
    how: How = How.PLAIN
    order: NDArray[np.int64] | None = None
    """Row, or input, of the file for each row, or input, of the weight; None: unchanged."""
    values: NDArray[np.float32] | None = None
    """The weight itself, if the metadata contains it; None otherwise."""


HARMLESS = {
    r"^rope_freqs\.weight$": "factors of RoPE frequencies, which are read from the configuration",
    r"^rope_factors_(long|short)\.weight$": "factors of RoPE frequencies, of the configuration",
    r"^blk\.\d+\.attn_rot_embd$": "RoPE frequencies, which are computed from the configuration",
    r"^blk\.\d+\.nextn\.": "of a layer that predicts a further token, which is not run",
}
"""Tensors from which no weight is made: patterns of names, with the reason."""

COPIES = {"attn_k_b.weight": "attn_kv_b.weight", "attn_v_b.weight": "attn_kv_b.weight"}
"""Tensors of a layer that duplicate another tensor, which is used if present."""

TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.norm.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
    "lm_head.bias": "output.bias",
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "model.embeddings.weight": "token_embd.weight",
    "model.norm_f.weight": "output_norm.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
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
"""Tensor names by module of a layer; ``.weight`` or ``.bias`` is appended to both."""

SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GLM4 = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}
SECOND_NORM = {"post_attention_layernorm": "post_attention_norm"}

SHORT_CONVOLUTIONS = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "conv.conv": "shortconv.conv",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
}
KIMI = {
    "self_attn.b_proj": "ssm_beta",
    "self_attn.forget_gate.f_a_proj": "ssm_f_a",
    "self_attn.forget_gate.f_b_proj": "ssm_f_b",
    "self_attn.g_a_proj": "ssm_g_a",
    "self_attn.g_b_proj": "ssm_g_b",
    "self_attn.o_norm": "ssm_norm",
}
GRANITE = {
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.out_proj": "ssm_out",
    "block_sparse_moe.router": "ffn_gate_inp",
}
INDEX = {
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
}
GEMMA4 = SANDWICH | {
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "router.proj": "ffn_gate_inp",
}
LLAMA4 = {
    "feed_forward.router": "ffn_gate_inp",
    **{
        f"feed_forward.{holder}{part}_proj": f"ffn_{part}{ending}"
        for holder, ending in (("", ""), ("shared_expert.", "_shexp"))
        for part in ("gate", "up", "down")
    },
}
AFMOE = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_mlp_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "self_attn.gate_proj": "attn_gate",
    "mlp.router.gate": "ffn_gate_inp",
}
HUNYUAN = {
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "mlp.gate.wg": "ffn_gate_inp",
    **{f"mlp.shared_mlp.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
NEMOTRON_H = {
    "norm": "attn_norm",
    "mixer.in_proj": "ssm_in",
    "mixer.conv1d": "ssm_conv1d",
    "mixer.out_proj": "ssm_out",
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
}
POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
SPECIAL = {
    "olmo2": POST_NORMS,
    "exaone4": POST_NORMS,
    "hunyuan-dense": HUNYUAN,
    "hunyuan-moe": HUNYUAN,
    "apertus": {"attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"},
    "afmoe": AFMOE,
    "gemma4": GEMMA4,
    "llama4": LLAMA4,
    "glm-dsa": INDEX,
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H,
    "seed_oss": SECOND_NORM,
    "granitemoe": {"block_sparse_moe.router": "ffn_gate_inp"},
    "gemma2": SANDWICH,
    "gemma3": SANDWICH,
    "glm4": GLM4,
    "glm4moe": SECOND_NORM,
    "gpt-oss": SECOND_NORM,
    "lfm2": SHORT_CONVOLUTIONS,
    "lfm2moe": SHORT_CONVOLUTIONS,
    "kimi-linear": KIMI,
    "granitehybrid": GRANITE,
    **dict.fromkeys(STATE_ARCHITECTURES, SECOND_NORM),
}
"""Tensor names of modules that differ in an architecture, by its name."""

CONVOLUTIONS = (".conv.conv.weight", ".mamba.conv1d.weight", ".mixer.conv1d.weight")
PERMUTED = (
    "llama",
    "mistral3",
    "granitehybrid",
    "granite",
    "granitemoe",
    "smollm3",
    "arcee",
    "olmo",
)
"""Architectures whose rows of q and k rotate as pairs of neighbours."""
CENTRED_NORMS = ("gemma", "nemotron", "gemma2", "gemma3", *STATE_ARCHITECTURES)
"""Architectures whose norms are stored as 1 + weight, except norms of a state's heads."""

STATE_SPACES = {"granitehybrid": "mamba", "nemotron_h": "mixer", "nemotron_h_moe": "mixer"}
"""Architectures with Mamba2 layers, each with the attribute of a decoder layer that holds the
Mamba2 mixer.
"""

FIRST_PARTS = ("attn_norm", "post_attention_norm", "attn_q")
"""Tensors of which every layer of every architecture has at least one, by which layers are
recognised.
"""

MAX_LAYERS = 2048


def make_recipes(
    architecture: str, tensors: Container[str], sizes: StateSizes | None = None
) -> dict[str, Recipe]:
    """Return the recipe of every weight that a skeleton may need, by its name there.

    Args:
        architecture: the file's name of it.
        tensors: the file's tensors; recipes with missing tensors are omitted.
        sizes: sizes of layers with a state; None: there are none.
    """
    recipes = {name: _choose(architecture, name, tensor) for name, tensor in TOP.items()}
    if TOP["lm_head.weight"] not in tensors:
        # A tied head may be read under its own name; it uses the embedding's codes.
        recipes["lm_head.weight"] = recipes["model.embed_tokens.weight"]
    modules = LAYER | SPECIAL.get(architecture, {})
    for layer in range(MAX_LAYERS):
        if not any(f"blk.{layer}.{part}.weight" in tensors for part in FIRST_PARTS):
            break
        ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
        for module, part in modules.items():
            for kind in ("weight", "bias"):
                name = f"{ours}{module}.{kind}"
                recipes[name] = _choose(architecture, name, f"{theirs}{part}.{kind}")
        for name, recipe in _list_special(architecture, theirs, tensors):
            recipes[ours + name] = recipe
        if sizes is not None:
            for name, recipe in _list_state(sizes, theirs, tensors):
                recipes[f"{ours}linear_attn.{name}"] = recipe
    return {
        name: recipe
        for name, recipe in recipes.items()
        if all(tensor in tensors for tensor in recipe.tensors)
    }


def _choose(architecture: str, name: str, tensor: str) -> Recipe:
    if architecture in PERMUTED and (".q_proj." in name or ".k_proj." in name):
        return Recipe((tensor,), How.UNPERMUTE)
    if name.endswith(CONVOLUTIONS):
        return Recipe((tensor,), How.FLAT)
    if architecture in CENTRED_NORMS and name.endswith("norm.weight"):
        return Recipe((tensor,), How.MINUS_ONE)
    return Recipe((tensor,))


def _list_state(
    sizes: StateSizes, layer: str, tensors: Container[str]
) -> Iterator[tuple[str, Recipe]]:
    """Yield the weights of a layer with a recurrent state, each with its recipe (the file's tensors
    and the operation that makes the weight of them).
    """
    qkv, z = f"{layer}attn_qkv.weight", f"{layer}attn_gate.weight"
    heads = sizes.order_heads(1) if sizes.has_order else None
    values = sizes.order_heads(sizes.value_dim) if sizes.has_order else None
    # The channel order also applies to the convolution, whose weight has shape [channels, 1, width]
    # in transformers.
    channels = sizes.order_channels()
    whole = f"{layer}ssm_in.weight"
    if whole in tensors:
        # Older files store in_proj_qkvz whole, from before llama.cpp's converter split it into qkv
        # and z.
        yield "in_proj_qkvz.weight", Recipe((whole,))
    else:
        yield "in_proj_qkvz.weight", Recipe((qkv, z), How.ORDERED, sizes.join_by_head())
    yield "in_proj_ba.weight", Recipe((f"{layer}ssm_ba.weight",))
    for name, tensor, how, order in (
        ("in_proj_qkv.weight", "attn_qkv.weight", How.ORDERED, channels),
        ("in_proj_z.weight", "attn_gate.weight", How.ORDERED, values),
        ("in_proj_b.weight", "ssm_beta.weight", How.ORDERED, heads),
        ("in_proj_a.weight", "ssm_alpha.weight", How.ORDERED, heads),
        ("conv1d.weight", "ssm_conv1d.weight", How.ORDERED, channels),
        ("dt_bias", "ssm_dt.bias", How.ORDERED, heads),
        ("out_proj.weight", "ssm_out.weight", How.TURNED_INPUTS, values),
        ("norm.weight", "ssm_norm.weight", How.PLAIN, None),
    ):
        yield name, Recipe((f"{layer}{tensor}",), How.PLAIN if order is None else how, order)
    yield "A_log", Recipe((f"{layer}ssm_a",), How.LOG_RATE, heads)


def _list_special(
    architecture: str, layer: str, tensors: Container[str]
) -> Iterator[tuple[str, Recipe]]:
    """Yield weights that are not a linear module's ``.weight``, or that combine several tensors."""
    yield "self_attn.sinks", Recipe((f"{layer}attn_sinks.weight",))
    yield "feed_forward.expert_bias", Recipe((f"{layer}exp_probs_b.bias",))
    yield from _list_mixer(architecture, layer, tensors)
    for holder in ("mlp.gate", "mlp", "mlp.gate.moe_statics", "mixer.gate"):
        yield f"{holder}.e_score_correction_bias", Recipe((f"{layer}exp_probs_b.bias",))
    yield "mlp.expert_bias", Recipe((f"{layer}exp_probs_b.bias",))
    if architecture == "gemma4":
        yield "layer_scalar", Recipe((f"{layer}layer_output_scale.weight",))
        yield "router.scale", Recipe((f"{layer}ffn_gate_inp.scale",))
        yield "router.per_expert_scale", Recipe((f"{layer}ffn_down_exps.scale",))
    split = (f"{layer}attn_k_b.weight", f"{layer}attn_v_b.weight")
    # ik_llama.cpp's files have the whole kv_b_proj beside its two parts, which have shapes of their
    # own, so the parts are only read if the whole is absent.
    if f"{layer}attn_kv_b.weight" not in tensors:
        yield "self_attn.kv_b_proj.weight", Recipe(split, How.JOIN_KV)
    alternates, is_turned = architecture == "gpt-oss", architecture in ("gpt-oss", "llama4")
    for ending, suffix in (("weight", ""), ("bias", "_bias")):
        gate, up, down = (f"{layer}ffn_{part}_exps.{ending}" for part in ("gate", "up", "down"))
        both = f"{layer}ffn_gate_up_exps.{ending}"
        how = How.TRANSPOSE if is_turned and ending == "weight" else How.PLAIN
        recipe = Recipe((gate, up), How.INTERLEAVE if alternates else how)
        if both in tensors and not is_turned:
            recipe = Recipe((both,))
        for holder in ("mlp.", "feed_forward.", "block_sparse_moe.", "mixer.", ""):
            yield f"{holder}experts.gate_up_proj{suffix}", recipe
            yield f"{holder}experts.down_proj{suffix}", Recipe((down,), how)
        yield f"mixer.experts.up_proj{suffix}", Recipe((up,))


def _list_mixer(
    architecture: str, layer: str, tensors: Container[str]
) -> Iterator[tuple[str, Recipe]]:
    """Yield Kimi delta attention's and Mamba2's weights other than matrices, and Granite's
    own MLP.
    """
    bias, rate = Recipe((f"{layer}ssm_dt.bias",)), Recipe((f"{layer}ssm_a",), How.LOG_RATE)
    if architecture == "kimi-linear":
        convolutions = tuple(f"{layer}ssm_conv1d_{part}.weight" for part in "qkv")
        yield "self_attn.conv1d.weight", Recipe(convolutions, How.STACKED)
        yield "self_attn.forget_gate.dt_bias", bias
        yield "self_attn.forget_gate.A_log", rate
    mixer = STATE_SPACES.get(architecture)
    if mixer is not None:
        yield f"{mixer}.dt_bias", bias
        yield f"{mixer}.A_log", rate
        yield f"{mixer}.D", Recipe((f"{layer}ssm_d",), How.FLAT)
        # The GGUF file stores the norm's weight as one row per group, so it is flattened.
        yield f"{mixer}.norm.weight", Recipe((f"{layer}ssm_norm.weight",), How.FLAT)
    if architecture == "granitehybrid":
        # In layers with routed experts this MLP is the shared expert (suffix _shexp), otherwise the
        # layer's only MLP.
        ending = "_shexp" if f"{layer}ffn_gate_inp.weight" in tensors else ""
        gate, up, down = (f"{layer}ffn_{part}{ending}.weight" for part in ("gate", "up", "down"))
        yield "shared_mlp.input_linear.weight", Recipe((gate, up))
        yield "shared_mlp.output_linear.weight", Recipe((down,))


XIELU = ("alpha_p", "alpha_n", "beta", "eps")
"""Parameters of the xIELU activation, which each layer has."""


def list_noted(metadata: Mapping[str, object], num_layers: int) -> dict[str, Recipe]:
    """Return the recipes of weights that are stored as metadata: xIELU's parameters.

    Args:
        metadata: the file's metadata; each parameter is a number, or one number for each layer.
        num_layers: number of layers.
    """
    recipes: dict[str, Recipe] = {}
    for part in XIELU:
        given = metadata.get(f"xielu.{part}")
        if not isinstance(given, (float, np.ndarray)):
            continue
        values = np.asarray(given)
        if values.dtype.kind != "f" or values.shape not in ((), (num_layers,)):
            continue
        for layer, value in enumerate(np.broadcast_to(values, num_layers)):
            number = np.array([value], np.float32)
            name = f"model.layers.{layer}.mlp.act_fn.{part}"
            recipes[name] = Recipe((), How.NOTED, values=number)
    return recipes
