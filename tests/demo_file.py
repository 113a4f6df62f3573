"""The demo model as one GGUF file, and what the folder that it was made of answers.

The demo's own way to split text has no name in GGUF, so the folder gets one that has.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tandem.kernels.paged import PagedBatch, SequenceChunk
from tandem.models.loading.hub import DEMO_FOLDER
from tandem.models.tokenizing.tokenizer import load_tokenizer
from tandem.server.text.chat_template import ChatTemplate

sys.path.append(str(Path(__file__).parent / "models"))

from gguf_vocabularies import byte_level
from gguf_writing import write_model
from loading import load_checkpoint

MESSAGES = [{"role": "user", "content": "Write a function that adds two numbers, 1234 and it's."}]
NUM_TOKENS = 24
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_folder(root: Path) -> Path:
    """The demo model, splitting text as Qwen2 does."""
    folder = root / "folder"
    shutil.copytree(DEMO_FOLDER, folder)
    document = json.loads((folder / "tokenizer.json").read_text())
    document["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": QWEN2}
    document["normalizer"] = {"type": "NFC"}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


def write_file(folder: Path) -> Path:
    """The same as one file, in F32 with its tokenizer and chat template in the metadata."""
    template = load_tokenizer(folder).chat_template
    path = folder.with_name("demo.gguf")
    write_model(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        path,
        tokenizer=byte_level(folder / "tokenizer.json", "qwen2", eos=0, pad=0),
        metadata=lambda writer: writer.add_chat_template(template),
    )
    return path


def answer(folder: Path) -> tuple[int, str]:
    """The length of the prompt of ``MESSAGES``, and the greedy answer to it, computed here."""
    tokenizer = load_tokenizer(folder)
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    prompt = tokenizer.encode(template.render(MESSAGES, {"add_generation_prompt": True}))
    template.close()
    ends = {0, tokenizer.encode("<|im_end|>")[0]}
    model = load_checkpoint(folder, dtype="bfloat16")
    cache = model.allocate_kv(8, block_size=64)
    tokens, fresh = [], prompt
    while len(tokens) < NUM_TOKENS and not ends & set(tokens):
        chunk = SequenceChunk(fresh, len(prompt) + len(tokens) - len(fresh), list(range(8)), "last")
        logits = model.forward(PagedBatch.build([chunk], 64), cache)
        fresh = [int(logits[-1].argmax())]
        tokens += fresh
    return len(prompt), tokenizer.decode(tokens, skip_special_tokens=True)
