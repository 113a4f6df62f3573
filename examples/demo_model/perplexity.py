"""The demo model's held-out loss in every weight format and every KV format, as two tables.

Scores the files of the standard library that training never saw, in windows of their own, through
the product's own loading and forward: what a format costs is measured on the model that is served.

    python examples/demo_model/perplexity.py [--windows N]
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from corpus import read_corpus
from stream import encode_files
from tokenizers import Tokenizer

from tandem.kernels.paged import PagedBatch, SequenceChunk
from tandem.kernels.weights.formats import WEIGHT_FORMATS
from tandem.models.loading.hub import resolve_folder
from tandem.models.loading.loader import CausalModel, load_model
from tandem.models.planning.planner import plan_model

WINDOW = 512
BLOCK_SIZE = 64


KV_FORMATS = ("float32", "bfloat16", "int8", "fp8")


def score(model: CausalModel, windows: np.ndarray, kv_dtype: str = "auto") -> np.ndarray:
    """Return the loss of every token but a window's first, in nats, [windows, WINDOW - 1]."""
    cache = model.allocate_kv(WINDOW // BLOCK_SIZE, block_size=BLOCK_SIZE, kv_dtype=kv_dtype)
    losses = []
    for window in windows:
        ids = window.tolist()
        chunk = SequenceChunk(ids, 0, list(range(cache.num_blocks)), "all")
        logits = model.forward(PagedBatch.build([chunk], BLOCK_SIZE), cache)
        log_probs = torch.log_softmax(logits[:-1], -1)
        losses.append(-log_probs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy())
    return np.stack(losses)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=128, help=f"windows of {WINDOW} tokens")
    num_windows = parser.parse_args().windows
    folder = resolve_folder("demo")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    recipe = json.loads((folder / "metrics.json").read_text())["recipe"]
    files = [file for file in read_corpus(recipe["max_file_bytes"]) if file.is_held_out]
    tokens = np.concatenate(encode_files(files, tokenizer))
    count = min(num_windows, len(tokens) // WINDOW)
    windows = tokens[: count * WINDOW].reshape(count, WINDOW).astype(np.int64)
    oracle = score(load(folder, "float32", "none"), windows)
    rows = [("float32", "none", oracle)]
    for name in ("none", *WEIGHT_FORMATS):
        model = load(folder, "bfloat16", name)
        rows.append(("bfloat16", name, score(model, windows)))
    print(f"{count} windows of {WINDOW} tokens from {len(files)} held-out files")
    print("| dtype | experts | bits a weight | perplexity | loss against float32 (nats) |")
    print("|---|---|---|---|---|")
    for dtype, name, losses in rows:
        bits = WEIGHT_FORMATS[name].bits_per_weight if name in WEIGHT_FORMATS else ""
        print(f"| {dtype} | {name} | {bits} | {describe(losses, oracle)} |")
    model = load(folder, "bfloat16", "bf16")
    print("\n| KV | bytes a token | perplexity | loss against float32 (nats) |")
    print("|---|---|---|---|")
    for name in KV_FORMATS:
        size = model.kv_layout(BLOCK_SIZE, name).bytes_per_token
        print(f"| {name} | {size} | {describe(score(model, windows, name), oracle)} |")


def load(folder: Path, dtype: str, expert_format: str) -> CausalModel:
    """Load the demo model with its experts in a format."""
    return load_model(plan_model(folder, dtype=dtype, expert_format=expert_format))


def describe(losses: np.ndarray, oracle: np.ndarray) -> str:
    """Return a row's perplexity, and its change of loss with the standard error of the mean."""
    change = losses - oracle
    error = change.std() / math.sqrt(change.size)
    return f"{math.exp(losses.mean()):.3f} | {change.mean():+.4f} ± {error:.4f}"


if __name__ == "__main__":
    main()
