"""Goal: ``tandem serve model.gguf`` is all that a user types, and answers as the original does.

Method: the demo model is written as GGUF in F32 with its tokenizer and chat template in the
metadata, and served. Its greedy answer must be, token by token, that of the folder of safetensors,
loaded here in the same dtype. (The demo's own way to split text has no name in GGUF, so the folder
gets one that has.)
"""

import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

import torch
from gguf_vocabularies import byte_level
from gguf_writing import write_model
from loading import load_checkpoint
from transformers import AutoModelForCausalLM

from tandem.kernels.paged import PagedBatch, SequenceChunk
from tandem.models.loading.hub import DEMO_FOLDER
from tandem.models.tokenizing.tokenizer import load_tokenizer
from tandem.server.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "Write a function that adds two numbers, 1234 and it's."}]
NUM_TOKENS = 24
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The demo model, splitting text as Qwen2 does."""
    root = tmp_path_factory.mktemp("gguf") / "folder"
    shutil.copytree(DEMO_FOLDER, root)
    document = json.loads((root / "tokenizer.json").read_text())
    document["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": QWEN2}
    document["normalizer"] = {"type": "NFC"}
    (root / "tokenizer.json").write_text(json.dumps(document))
    return root


@pytest.fixture(scope="module")
def file(folder) -> Path:
    """The same as one file."""
    template = load_tokenizer(folder).chat_template
    path = folder.with_name("demo.gguf")
    write_model(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        path,
        tokenizer=byte_level(folder / "tokenizer.json", "qwen2", eos=0, pad=0),
        metadata=lambda writer: writer.add_chat_template(template),
    )
    return path


def answer(folder: Path, prompt: list[int], ends: set[int]) -> list[int]:
    """The greedy continuation, computed here."""
    model = load_checkpoint(folder, dtype="bfloat16")
    cache = model.allocate_kv(8, block_size=64)
    tokens, fresh = [], prompt
    while len(tokens) < NUM_TOKENS and not ends & set(tokens):
        chunk = SequenceChunk(fresh, len(prompt) + len(tokens) - len(fresh), list(range(8)), "last")
        logits = model.forward(PagedBatch.build([chunk], 64), cache)
        fresh = [int(logits[-1].argmax())]
        tokens += fresh
    return tokens


def test_a_gguf_file_alone_is_served(folder, file, monkeypatch, serve_demo):
    """Template, tokens, weights and end of text come from the one file."""
    tokenizer = load_tokenizer(folder)
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    text = template.render(MESSAGES, {"add_generation_prompt": True})
    template.close()
    prompt = tokenizer.encode(text)
    wanted = answer(folder, prompt, {0, tokenizer.encode("<|im_end|>")[0]})
    monkeypatch.setenv("TANDEM_TEST_MODEL", str(file))
    with serve_demo("--model.dtype", "bfloat16") as server:
        body = {"messages": MESSAGES, "max_tokens": NUM_TOKENS, "temperature": 0}
        given = server.client.post("/v1/chat/completions", json={"model": "demo", **body}).json()
    assert given["usage"]["prompt_tokens"] == len(prompt)
    content = given["choices"][0]["message"]["content"]
    assert content == tokenizer.decode(wanted, skip_special_tokens=True)
    assert content
