"""The tokenizer: byte-level BPE fitted to Python source, and its chat template.

Owns the split pattern, the special tokens and the files that `AutoTokenizer` reads. Every Unicode
string survives a round trip: the base alphabet is all 256 bytes and nothing is normalised.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END]

# A prompt ends where its writer stopped, so a token should not reach over the places where one
# stops: after a line break, after the indent, after "self." or "(". Line breaks, indents and
# punctuation are therefore tokens of their own; a space or an underscore goes with its word.
# Digits stand alone, so numbers need no vocabulary.
SPLIT_PATTERN = "|".join(
    (
        r"__\p{L}+__",
        r"[ _]?\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+",
        r"(?:\r?\n)+",
        r"[ \t]+",
        r"\s+",
    )
)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    # A client may send content as a list of parts; only text means anything here.
    "{%- else -%}{%- for part in message['content'] or [] if part['type'] == 'text' -%}"
    "{{- part['text'] -}}{%- endfor -%}{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Fit byte-level BPE with `vocab_size` tokens, the special tokens among them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=32,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def render_chat(messages: list[dict[str, str]]) -> str:
    """Render a conversation exactly as `CHAT_TEMPLATE` does without a generation prompt."""
    return "".join(
        f"{TURN_START}{message['role']}\n{message['content']}{TURN_END}\n" for message in messages
    )


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context_len: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_len,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START, TURN_END],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", config)
    stop_ids = [tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(TURN_END)]
    generation = {"eos_token_id": stop_ids, "pad_token_id": stop_ids[0]}
    _write_json(folder / "generation_config.json", generation)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
