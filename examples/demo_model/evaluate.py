"""The measurements: held-out loss of every form of the model, beside the trigram's.

Owns which tokens are scored: all held-out files, each closed by an end-of-text token, one after
another. All contestants score the same tokens. The model reads them in windows of its full context
that do not overlap, so it starts each window knowing nothing; the trigram never does.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from corpus import SourceFile
from export import load_exported
from model import DemoModel
from recipe import Recipe
from stream import encode_files
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from trigram import Trigram

NUM_POSITION_RANGES = 8


@torch.no_grad()
def score_tokens(
    forward: Callable[[Tensor], Tensor], tokens: np.ndarray, context_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Log probability of each token but the first, and its position in its window."""
    scores, positions = [], []
    for start in range(0, len(tokens) - 1, context_len):
        window = torch.from_numpy(tokens[start : start + context_len + 1].astype(np.int64))
        logits = forward(window[None, :-1])[0].float()
        scores.append(-functional.cross_entropy(logits, window[1:], reduction="none").numpy())
        positions.append(np.arange(len(window) - 1))
    return np.concatenate(scores), np.concatenate(positions)


def evaluate(
    model: DemoModel, files: list[SourceFile], tokenizer: Tokenizer, recipe: Recipe, folder: Path
) -> dict:
    """Score everything; return the numbers by name."""
    held_out = [file for file in files if file.is_held_out]
    seen = [file for file in files if not file.is_held_out]
    tokens = np.concatenate(encode_files(held_out, tokenizer))
    num_bytes = sum(len(file.text.encode()) for file in held_out)
    context_len, vocab_size = recipe.shape.context_len, recipe.shape.vocab_size

    exact = DemoModel(recipe.shape, compute_dtype=torch.float32)
    exact.load_state_dict(model.state_dict())
    loads: list[Tensor] = []

    def score_exactly(ids: Tensor) -> Tensor:
        logits = exact(ids)
        loads.append(torch.stack([layer.mlp.load for layer in exact.model.layers]))
        return logits

    forms: dict[str, Callable[[Tensor], Tensor]] = {
        "model_float32": score_exactly,
        "exported_weights_float32_compute": _wrap(folder, torch.float32),
        "exported_weights_bfloat16_compute": _wrap(folder, torch.bfloat16),
    }
    results: dict = {"held_out_tokens": len(tokens) - 2, "held_out_bytes": num_bytes}
    losses: dict[str, dict[str, float]] = {}
    for name, forward in forms.items():
        scores, positions = score_tokens(forward, tokens, context_len)
        losses[name] = _summarize(scores[1:], num_bytes)
        if name == "exported_weights_bfloat16_compute":
            results["loss_by_position"] = _split_by_position(scores, positions, context_len)
    mean_loads = torch.stack(loads).mean(0).tolist()
    results["expert_load"] = [[round(share, 4) for share in layer] for layer in mean_loads]

    # The trigram may count every training file, also the tests that the model did not get to.
    baseline = Trigram(np.concatenate(encode_files(seen, tokenizer)), vocab_size)
    losses["trigram"] = _summarize(baseline.score(tokens), num_bytes)
    results["losses"] = losses
    return results


def _wrap(folder: Path, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    exported = load_exported(folder, dtype)
    return lambda ids: exported(ids).logits


def _summarize(scores: np.ndarray, num_bytes: int) -> dict[str, float]:
    total = -float(scores.sum(dtype=np.float64))
    return {
        "nats_per_token": round(total / len(scores), 4),
        "bits_per_byte": round(total / math.log(2) / num_bytes, 4),
    }


def _split_by_position(scores: np.ndarray, positions: np.ndarray, context_len: int) -> list[dict]:
    """Mean loss in ranges of positions that double in length, up to the full context."""
    edges = [0, *(context_len >> i for i in reversed(range(NUM_POSITION_RANGES)))]
    rows = []
    for start, end in pairwise(edges):
        chosen = scores[(positions >= start) & (positions < end)]
        if len(chosen) > 0:
            mean = -float(chosen.mean(dtype=np.float64))
            rows.append({"start": start, "end": end, "nats_per_token": round(mean, 4)})
    return rows
