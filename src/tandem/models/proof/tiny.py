"""The tiny model of a proof: transformers' eager code with random weights, and its checkpoint."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.kernels import tolerance
from tandem.models.families import choose_auto_class
from tandem.models.planning.roles import find_base_part
from tandem.models.proof.shrink import NUM_TOKENS, TRAINED_CONTEXT

__all__ = [
    "Reference",
    "build_eager",
    "list_prompts",
    "make_references",
    "make_tiny",
    "make_tokens",
    "run_eager",
    "save_tiny",
]

MATRIX_GAIN, SCORE_GAIN = 1.3, 2.0
"""Gains of random matrices: one that keeps activations' size, and one for scores, which separates
them.
"""
CONDITION = 4.0
"""Factor on eager code's own float32 error, to allow for other orders of the same sums."""
MAX_EAGER_EXCESS = 12.0
VECTOR_SPREAD = 0.3
"""Spread of random vectors: norms about 1 (or 0 if the norm adds 1), biases about 0."""


@dataclass(frozen=True)
class Reference:
    """The logits of transformers' eager model of a tiny configuration for one prompt, exact and in
    float32, and how far ours may differ from them.
    """

    tokens: Tensor
    """The prompt, int64 [T]."""
    exact: NDArray[np.float64]
    """Exact logits [T, V], in float64."""
    bound: NDArray[np.float64]
    """Bound on the error of the same sums in another order: the derived bound, or a larger one if
    the model is badly conditioned.

    Scores that separate tokens and experts amplify rounding errors, which the derivation ignores;
    eager's own float32 error shows by how much.
    """
    eager_excess: float
    """Error of eager's own float32, in units of the derived bound."""

    @property
    def is_useful(self) -> bool:
        """True if the tiny model is well conditioned enough to tell a wrong operator from
        rounding.
        """
        return self.eager_excess <= MAX_EAGER_EXCESS

    def find_excess(self, logits: Tensor) -> float:
        """Return the largest error of a logit of ours, as a multiple of the allowed error; NaN
        counts as infinite.
        """
        off = np.abs(logits.double().numpy() - self.exact) / self.bound
        return float(np.max(off)) if np.isfinite(off).all() else float("inf")


def build_eager(config: Any) -> Any:
    """Build transformers' own model of a configuration in eager code, in float32."""
    return (
        choose_auto_class(config)
        .from_config(
            config,
            attn_implementation="eager",
            experts_implementation="eager",
            dtype=torch.float32,
        )
        .eval()
    )


def make_tiny(config: Any, seed: int, gain: float = 1.0) -> Any:
    """Build transformers' eager model of a tiny configuration, with random parameters and random
    stored buffers; ``gain`` is a further factor on its matrices.
    """
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = build_eager(config)
    finally:
        torch.random.set_rng_state(state)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill(name, parameter, generator, gain)
        for module in model.modules():
            for key, buffer in module._buffers.items():
                is_stored = key not in module._non_persistent_buffers_set
                if is_stored and buffer is not None and buffer.is_floating_point():
                    noise = torch.randn(buffer.shape, generator=generator)
                    buffer.copy_(float(buffer.mean()) + VECTOR_SPREAD * noise)
    return model


def _fill(name: str, parameter: Tensor, generator: torch.Generator, factor: float) -> None:
    noise = torch.randn(parameter.shape, generator=generator)
    if parameter.dim() == 1:
        # The initial values of transformers tell the kind of a vector: a norm starts at 1 (or at 0
        # if it adds 1), a bias at 0, attention sinks at large random values.
        center, spread = float(parameter.mean()), VECTOR_SPREAD
        is_even = bool((parameter == parameter[0]).all())
        parameter.copy_(center + spread * noise if is_even else noise)
    else:
        is_score = any(word in name for word in ("gate.weight", "router.weight", "q_proj", "q_b"))
        gain = factor * (SCORE_GAIN if is_score else MATRIX_GAIN)
        parameter.copy_(gain * noise * parameter.shape[-1] ** -0.5)


def make_tokens(config: Any, seed: int, num_tokens: int = NUM_TOKENS) -> Tensor:
    """Return random token ids, int64 [num_tokens], on which a tiny model of ours is compared with
    transformers'; the same for the same seed.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randint(3, config.vocab_size, (num_tokens,), generator=generator)


def list_prompts(config: Any, tokens: Tensor) -> list[Tensor]:
    """Return the prompts on which a tiny model is compared: the tokens, which cross every length
    that the configuration names; and, for a LongRoPE, which takes other angles within its original
    length, as many of them as end there.
    """
    ropes: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    places = [value for value in ropes.values() if isinstance(value, dict)] or [ropes]
    is_long = any(rope.get("rope_type") == "longrope" for rope in places)
    return [tokens, tokens[:TRAINED_CONTEXT]] if is_long else [tokens]


def save_tiny(model: Any, folder: Path) -> None:
    """Save a tiny model as a checkpoint, with the tensor names that the family's checkpoints on the
    hub have.
    """
    from transformers.utils import logging as transformers_logging

    is_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        # transformers' save would split the convolution into equal parts, even if q, k and v have
        # different sizes.
        is_cut = any(hasattr(m, "conv1d") and hasattr(m, "g_proj") for m in model.modules())
        model.save_pretrained(folder, save_original_format=not is_cut)
    finally:
        if is_shown:
            transformers_logging.enable_progress_bar()


@torch.inference_mode()
def run_eager(model: Any, tokens: Tensor, *, is_stepwise: bool = False) -> Tensor:
    """Run transformers' eager model over a sequence; return logits [T, V].

    ``is_stepwise``: True to run token by token, for a RoPE that depends on the sequence's length.
    """
    if not is_stepwise:
        return model(tokens[None], use_cache=False).logits[0]
    from transformers import DynamicCache

    cache, rows = DynamicCache(config=model.config), []
    for token in tokens:
        output = model(token.view(1, 1), use_cache=True, **name_cache(model, cache))
        rows.append(output.logits[0, 0])
    return torch.stack(rows)


def name_cache(model: Any, cache: Any) -> dict[str, Any]:
    """Return the keyword argument that passes a cache object to a transformers model; release 5.24
    renamed it.
    """
    names = inspect.signature(type(model).forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}


def make_references(
    model: Any, prompts: list[Tensor], *, is_stepwise: bool
) -> tuple[Reference, ...]:
    """Run transformers' eager model over each prompt in float32 and in float64, to compare ours
    with; the model is left in float64.
    """
    rounded = [run_eager(model, tokens, is_stepwise=is_stepwise) for tokens in prompts]
    model.double()
    return tuple(
        _make_reference(model, tokens, logits, is_stepwise=is_stepwise)
        for tokens, logits in zip(prompts, rounded, strict=True)
    )


def _make_reference(model: Any, tokens: Tensor, rounded: Tensor, *, is_stepwise: bool) -> Reference:
    hidden: list[Tensor] = []
    norm = find_base_part(model, "norm")[1]
    hook = norm.register_forward_hook(lambda *args: hidden.append(args[2].detach()[0]))
    try:
        exact = run_eager(model, tokens, is_stepwise=is_stepwise)
    finally:
        hook.remove()
    weight = model.get_output_embeddings().weight.detach().double().numpy()
    layers = model.config.num_hidden_layers
    states = torch.cat(hidden).double().numpy()
    bound = tolerance.logits(states, weight, layers, torch.float32)
    values = exact.double().numpy()
    off = float(np.max(np.abs(rounded.double().numpy() - values) / bound))
    return Reference(tokens, values, bound * max(1.0, CONDITION * off), off)
