"""Oracles: the definition of each operator in plain float64 NumPy.

A kernel is right if it agrees with its oracle within ``tandem.kernels.tolerance``. Loops follow the
indices of the papers' formulas; speed does not matter.

Shapes: T tokens, D hidden, F intermediate, N outputs, H query heads, K KV heads, d head_dim, C
context tokens, E experts, P experts per token, V vocabulary.
"""

import math

import numpy as np
import numpy.typing as npt

from tandem.core.model.layers import RopeSpec

__all__ = [
    "attention",
    "choose_experts",
    "choose_token",
    "edit_logits",
    "embedding",
    "experts",
    "gather_context",
    "keep_tokens",
    "latent_attention",
    "linear",
    "log_softmax",
    "mlp",
    "moe_block",
    "rms_norm",
    "rope",
    "rope_frequencies",
    "rotate",
    "router",
    "silu",
]

Array = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


def linear(x_TD: Array, w_ND: Array, b_N: Array | None = None) -> Array:
    """Return ``x W^T + b``; also used for the LM head."""
    y_TN = x_TD @ w_ND.T
    return y_TN if b_N is None else y_TN + b_N


def embedding(ids_T: Ids, w_VD: Array) -> Array:
    """Return the embedding row of each token id."""
    return w_VD[ids_T]


def rms_norm(x_TD: Array, w_D: Array, eps: float) -> Array:
    """Apply RMSNorm (arXiv:1910.07467, equation 4), with epsilon under the root."""
    return x_TD / np.sqrt(np.mean(x_TD**2, axis=-1, keepdims=True) + eps) * w_D


def rope_frequencies(p: RopeSpec, position: int) -> tuple[Array, float]:
    """Return (radians per token of each pair; factor on cos and sin) at a position."""
    d, n = p.head_dim, p.max_position_embeddings
    context = p.original_max_position_embeddings or n
    base = p.rope_theta
    if p.rope_type == "dynamic":
        base *= (p.factor * max(position + 1, n) / n - (p.factor - 1)) ** (d / (d - 2))
    freq = np.array([base ** (-2 * i / d) for i in range(d // 2)])
    if p.rope_type == "linear":
        return freq / p.factor, 1.0
    if p.rope_type == "llama3":
        turns = context * freq / (2 * math.pi)
        keep = np.clip((turns - p.low_freq_factor) / (p.high_freq_factor - p.low_freq_factor), 0, 1)
        return keep * freq + (1 - keep) * freq / p.factor, 1.0
    if p.rope_type == "longrope":
        log = math.log(max(p.factor, 1.0)) / math.log(p.original_max_position_embeddings or n)
        scale = math.sqrt(1 + log) if p.attention_factor is None else p.attention_factor
        return freq / np.array(p.long_factor if p.is_long else p.short_factor), scale
    if p.rope_type == "yarn":
        return _yarn(p, freq, context)
    return freq, 1.0


def _yarn(p: RopeSpec, freq: Array, context: int) -> tuple[Array, float]:
    """Scale frequencies by YaRN (arXiv:2309.00071, section 3.2 and equation 22)."""

    def pair_of(turns: float) -> float:
        return p.head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(p.rope_theta))

    low, high = pair_of(p.beta_fast), pair_of(p.beta_slow)
    if p.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, p.head_dim - 1)
    high += 0.001 if low == high else 0
    ramp = np.clip((np.arange(len(freq)) - low) / (high - low), 0, 1)
    factor = p.attention_factor
    if factor is None:
        one, all_dim = (p.mscale or 1.0), (p.mscale_all_dim or 0.0)
        one, all_dim = (one, all_dim) if p.mscale and all_dim else (1.0, 0.0)
        log = math.log(max(p.factor, 1.0))
        factor = (0.1 * one * log + 1) / (0.1 * all_dim * log + 1)
    return freq * (1 - ramp) + freq / p.factor * ramp, factor


def rope(p: RopeSpec, positions_T: Ids) -> tuple[Array, Array]:
    """Return cosines and sines [T, d] of each position; both halves of d are equal."""
    rows = []
    for position in positions_T.tolist():
        freq, factor = rope_frequencies(p, position)
        angles = np.concatenate([position * freq, position * freq])
        rows.append((np.cos(angles) * factor, np.sin(angles) * factor))
    return np.array([cos for cos, _ in rows]), np.array([sin for _, sin in rows])


def rotate(x_THd: Array, cos_Td: Array, sin_Td: Array) -> Array:
    """Rotate each pair (x[i], x[i + d/2]) by its angle."""
    half = x_THd.shape[-1] // 2
    turned = np.concatenate([-x_THd[..., half:], x_THd[..., :half]], axis=-1)
    return x_THd * cos_Td[:, None] + turned * sin_Td[:, None]


def gather_context(cache: Array, block_table: list[int], layer_idx: int, length: int) -> Array:
    """Return a sequence's keys and values [2, C, K, d] from blocks [n, L, 2, K, size, d]."""
    size = cache.shape[4]
    tokens = [cache[block_table[i // size], layer_idx, :, :, i % size] for i in range(length)]
    return np.stack(tokens, axis=1)


def attention(
    q_THd: Array,
    k_CKd: Array,
    v_CKd: Array,
    scale: float,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks_H: Array | None = None,
) -> Array:
    """Attend causally (GQA): query t sees the first C - T + t + 1 keys; head h reads KV head h //
    (H / K).

    With a window it sees the last of those only; a cap bends scores, cap * tanh(score / cap); a
    sink is one more score of its head, whose value is zero. Values may be narrower than keys.
    """
    num_tokens, heads, _ = q_THd.shape
    context, kv_heads, size = v_CKd.shape
    out = np.zeros((num_tokens, heads, size))
    for t in range(num_tokens):
        end = context - num_tokens + t + 1
        seen = slice(max(0, end - window) if window else 0, end)
        for h in range(heads):
            g = h // (heads // kv_heads)
            scores = k_CKd[seen, g] @ q_THd[t, h] * scale
            if soft_cap:
                scores = soft_cap * np.tanh(scores / soft_cap)
            sink = -np.inf if sinks_H is None else sinks_H[h]
            largest = max(scores.max(), sink)
            p = np.exp(scores - largest)
            out[t, h] = p @ v_CKd[seen, g] / (p.sum() + np.exp(sink - largest))
    return out


def latent_attention(
    x_TD: Array,
    w: dict[str, Array],
    positions_T: Ids,
    p: RopeSpec,
    *,
    num_heads: int,
    nope: int,
    scale: float,
    eps: float,
    is_interleaved: bool,
) -> Array:
    """Run multi-head latent attention over a whole sequence, with all keys and values expanded.

    DeepSeek-V2, arXiv:2405.04434, equations 37 to 47. ``w`` holds weights by checkpoint name
    without the module's prefix; a missing bias counts as none. With ``is_interleaved`` the rotated
    items are pairs of neighbours.
    """
    rope_dim = p.head_dim
    order = np.arange(rope_dim)
    if is_interleaved:
        order = np.concatenate([order[0::2], order[1::2]])

    def project(h: Array, name: str) -> Array:
        return linear(h, w[f"{name}.weight"], w.get(f"{name}.bias"))

    if "q_a_proj.weight" in w:
        compressed = rms_norm(project(x_TD, "q_a_proj"), w["q_a_layernorm.weight"], eps)
        q = project(compressed, "q_b_proj")
    else:
        q = project(x_TD, "q_proj")
    q_THd = q.reshape(len(x_TD), num_heads, nope + rope_dim)
    joint = project(x_TD, "kv_a_proj_with_mqa")
    rank = joint.shape[1] - rope_dim
    latent = rms_norm(joint[:, :rank], w["kv_a_layernorm.weight"], eps)
    expanded = project(latent, "kv_b_proj").reshape(len(x_TD), num_heads, -1)
    cos, sin = rope(p, positions_T)
    q_end = rotate(q_THd[..., nope:][..., order], cos, sin)
    k_end = rotate(joint[:, None, rank:][..., order], cos, sin).repeat(num_heads, axis=1)
    queries = np.concatenate([q_THd[..., :nope], q_end], axis=-1)
    keys = np.concatenate([expanded[..., :nope], k_end], axis=-1)
    mixed = attention(queries, keys, expanded[..., nope:], scale)
    return project(mixed.reshape(len(x_TD), -1), "o_proj")


def silu(x: Array) -> Array:
    """Return ``x * sigmoid(x)``, computed without overflow."""
    return x * 0.5 * (1 + np.tanh(x / 2))


def mlp(x_TD: Array, gate_up: Array, down_DF: Array) -> Array:
    """Run a SwiGLU MLP (arXiv:2002.05202); ``gate_up`` [2 F, D] has the gate's rows first."""
    gate, up = np.split(x_TD @ gate_up.T, 2, axis=-1)
    return (silu(gate) * up) @ down_DF.T


def router(x_TD: Array, w_ED: Array, top_k: int, *, is_normalised: bool) -> tuple[Array, Ids]:
    """Return router weights and expert ids [T, P], best first: softmax over all experts, then top
    P.
    """
    scoring = "softmax_normalised" if is_normalised else "softmax"
    return choose_experts(x_TD @ w_ED.T, top_k, scoring)


def choose_experts(
    logits_TE: Array,
    top_k: int,
    scoring: str,
    *,
    bias_E: Array | None = None,
    num_groups: int = 1,
    num_top_groups: int = 1,
    num_group_choices: int = 2,
) -> tuple[Array, Ids]:
    """Return router weights and expert ids [T, P], best first; of equal scores the lower id.

    Scores are the softmax or sigmoid of the logits. Experts are chosen by score (for a softmax, by
    logit) plus bias, within the groups whose best choices have the largest sum: of two choices each
    (DeepSeek-V3, arXiv:2412.19437, section 2.1.2) or of one (DeepSeek-V2, arXiv:2405.04434, section
    2.2.2). The weights are the scores; with ``_normalised`` they are divided by their sum.
    """
    is_sigmoid = scoring.startswith("sigmoid")
    p = np.exp(logits_TE - logits_TE.max(axis=-1, keepdims=True))
    scores = 1 / (1 + np.exp(-logits_TE)) if is_sigmoid else p / p.sum(axis=-1, keepdims=True)
    choice = (scores if is_sigmoid else logits_TE) + (0 if bias_E is None else bias_E)
    if num_groups > 1:
        groups = choice.reshape(len(choice), num_groups, -1)
        sums = np.sort(groups, axis=-1)[..., -num_group_choices:].sum(axis=-1)
        dropped = np.argsort(-sums, axis=-1, kind="stable")[:, num_top_groups:]
        np.put_along_axis(groups, dropped[..., None], -np.inf, axis=1)
        choice = groups.reshape(choice.shape)
    ids = np.argsort(-choice, axis=-1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(scores, ids, axis=-1)
    if scoring.endswith("_normalised"):
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights, ids


def experts(x_TD: Array, ids_TP: Ids, w_TP: Array, gate_up: Array, down: Array) -> Array:
    """Return the weighted sum of the chosen experts; id -1 adds nothing."""
    out = np.zeros_like(x_TD)
    for t in range(len(x_TD)):
        for e, weight in zip(ids_TP[t], w_TP[t], strict=True):
            if e >= 0:
                out[t] += weight * mlp(x_TD[t : t + 1], gate_up[e], down[e])[0]
    return out


def moe_block(
    x_TD: Array, gate_ED: Array, gate_up: Array, down: Array, top_k: int, *, is_normalised: bool
) -> Array:
    """Run the router and the experts that it chooses."""
    weights, ids = router(x_TD, gate_ED, top_k, is_normalised=is_normalised)
    return experts(x_TD, ids, weights, gate_up, down)


def log_softmax(logits_RV: Array) -> Array:
    """Return the natural log-probabilities of the tokens, given each row's logits."""
    shifted = logits_RV - logits_RV.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def edit_logits(
    logits_V: Array,
    prompt_ids: list[int],
    output_ids: list[int],
    *,
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
) -> Array:
    """Apply the repetition penalty of CTRL (arXiv:1909.05858), and OpenAI's other penalties."""
    out = logits_V.copy()
    for i in {*prompt_ids, *output_ids}:
        out[i] = out[i] / repetition if out[i] > 0 else out[i] * repetition
    for i in set(output_ids):
        out[i] -= output_ids.count(i) * frequency + presence
    return out


def keep_tokens(
    logits_V: Array, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[Ids, Array]:
    """Return the tokens that may be sampled, in sampling order, and their cumulative weights."""
    weights = np.exp((logits_V - logits_V.max()) / temperature)
    order = np.arange(len(logits_V))
    if top_k or top_p < 1.0 or min_p > 0.0:
        order = np.argsort(-logits_V, kind="stable")
        order = order[weights[order] >= min_p][: top_k or None]
    if top_p < 1.0:
        before = np.cumsum(weights[order]) - weights[order]
        order = order[before < top_p * weights[order].sum()]
    return order, np.cumsum(weights[order])


def choose_token(order: Ids, mass: Array, draw: float) -> int:
    """Return the index of the first token whose cumulative weight exceeds the draw's share."""
    place = np.searchsorted(mass, draw * mass[-1], side="right")
    return min(int(place), len(order) - 1)
