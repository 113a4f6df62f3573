"""RoPE of a GGUF file: its base, its scaling, and the factors of Llama 3.1 and of LongRoPE."""

import numpy as np

from tandem.core.errors import ConfigError, UnsupportedError
from tandem.models.gguf.facts import WHERE, Config, Facts, show

__all__ = ["LONG_FACTORS", "ROPE_FACTORS", "SHORT_FACTORS", "make_rope"]

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor whose presence means that frequencies are scaled as in Llama 3.1."""
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors whose presence means that frequencies are scaled as in LongRoPE."""
STILL = 1e29
"""Frequency factor from which on a frequency counts as divided to zero, so that nothing is rotated.
"""


def make_rope(facts: Facts) -> Config:
    """Return the RoPE parameters.

    Raises: ConfigError (the scaling type is not a name); UnsupportedError (factors of another kind
        than Llama 3.1's).
    """
    rope: Config = {"rope_type": "default", "rope_theta": facts.number("rope.freq_base", 10_000.0)}
    rotated = facts.count("rope.dimension_count", facts.head_dim)
    if rotated != facts.head_dim:
        rope["partial_rotary_factor"] = rotated / facts.head_dim
    kind = facts.find("rope.scaling.type")
    if not isinstance(kind, str | None):
        text = f"{facts.architecture}.rope.scaling.type is {show(kind)}: need a name"
        raise ConfigError(WHERE, text)
    if kind is None and facts.find("rope.scale_linear") is not None:
        rope |= {"rope_type": "linear", "factor": facts.number("rope.scale_linear")}
    elif kind not in (None, "none"):
        rope |= {"rope_type": str(kind), "factor": facts.number("rope.scaling.factor", 1.0)}
        original = facts.count("rope.scaling.original_context_length", 0)
        if original:
            rope["original_max_position_embeddings"] = original
    if rope["rope_type"] == "yarn":
        beta_fast = facts.number("rope.scaling.yarn_beta_fast", 32.0)
        beta_slow = facts.number("rope.scaling.yarn_beta_slow", 1.0)
        rope |= {"beta_fast": beta_fast, "beta_slow": beta_slow}
    factors = facts.list_rope_factors(ROPE_FACTORS)
    if factors is not None and facts.architecture == "gemma4":
        rope |= _find_proportional_rope(factors)
    elif factors is not None:
        rope |= _find_llama3_rope(factors, rope["rope_theta"], facts.head_dim)
    if rope["rope_type"] == "longrope" or facts.has(LONG_FACTORS) or facts.has(SHORT_FACTORS):
        rope |= _find_longrope(facts)
        rope.pop("factor", None)
    return rope


def _find_longrope(facts: Facts) -> Config:
    """Return the parameters of a LongRoPE. Its factor on cos and sin is in the file, which lacks
    the ratio that it was computed from.

    Raises: ConfigError (one of the two tensors of factors is missing).
    """
    long, short = facts.list_rope_factors(LONG_FACTORS), facts.list_rope_factors(SHORT_FACTORS)
    if long is None or short is None:
        raise ConfigError(WHERE, f"a LongRoPE needs both {LONG_FACTORS} and {SHORT_FACTORS}")
    original = facts.count("rope.scaling.original_context_length", facts.count("context_length"))
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "long_factor": long,
        "short_factor": short,
        "attention_factor": facts.number("rope.scaling.attn_factor", 1.0),
    }


def _find_proportional_rope(factors: list[float]) -> Config:
    """Return the parameters of a RoPE whose factors leave the last pairs unrotated.

    Raises: UnsupportedError (factors of another kind).
    """
    rotated = sum(factor == 1 for factor in factors)
    if not rotated or any(factor < STILL for factor in factors[rotated:]):
        text = f"{ROPE_FACTORS} are neither 1 nor {STILL:g} and more, as of Gemma 4"
        raise UnsupportedError(WHERE, text)
    return {"rope_type": "proportional", "partial_rotary_factor": rotated / len(factors)}


def _find_llama3_rope(factors: list[float], theta: float, head_dim: int) -> Config:
    """Return the Llama 3.1 parameters that give these factors; the file stores only the factors.

    All published models of this kind share all parameters except the scaling factor, which is the
    largest of the factors.

    Raises: UnsupportedError (the factors are not those of Llama 3.1's scaling).
    """
    low, high, original = 1.0, 4.0, 8192
    factor = max(factors)
    wanted = None
    if 2 * len(factors) == head_dim and theta > 0 and factor > 0:
        inverse = theta ** -(np.arange(0, head_dim, 2) / head_dim)
        turns = original * inverse / (2 * np.pi)
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        wanted = 1 / ((1 - smooth) / factor + smooth)
    if wanted is None or not np.allclose(factors, wanted, rtol=1e-3):
        raise UnsupportedError(
            WHERE,
            f"{ROPE_FACTORS} are not those of Llama 3.1 to 3.3: name a folder with the "
            "model's config.json beside the GGUF file",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
