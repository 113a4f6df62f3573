"""Samples: continue some prompts with an exported folder, `python sample.py FOLDER`."""

import argparse
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

PROMPTS = (
    "def fibonacci(n):\n",
    'import os\n\ndef find_files(path, pattern):\n    """',
    "class Stack:\n    def __init__(self):\n",
    "import unittest\n\nclass TestParser(unittest.TestCase):\n",
    "def read_config(filename):\n    with open(filename) as f:\n",
)
CHATS = (
    "Write a function read_lines(path): Return the lines of a file.",
    'Continue this code:\ndef is_empty(self):\n    """Return True if the queue is empty."""\n',
)
MAX_NEW_TOKENS = 120


def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompt: str, temperature: float
) -> str:
    """Continue a prompt; temperature 0 is greedy."""
    torch.manual_seed(0)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    options = {"do_sample": False}
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature, "top_p": 0.95, "top_k": 0}
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, **options)
    return tokenizer.decode(out[0, ids.shape[1] :])


def main() -> None:
    """Print every prompt's continuations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = list(PROMPTS)
    for request in CHATS:
        messages = [{"role": "user", "content": request}]
        prompts.append(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )
    for prompt in prompts:
        for temperature in (0.0, 0.7):
            text = generate(model, tokenizer, prompt, temperature)
            print(f"=== temperature {temperature}\n{prompt}>>>{text}\n")


if __name__ == "__main__":
    main()
