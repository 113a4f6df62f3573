"""Tiny tokenizers of the kinds that real checkpoints have."""

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from tandem.models.tokenizing.tokenizer import Tokenizer

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.content == 'refuse me' -%}{{ raise_exception('refused') }}{%- endif -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
TOOL_TEMPLATE = (
    "{%- if tools -%}<tools>{{ tools | tojson }}</tools>{%- endif -%}"
    "{%- for m in messages -%}[{{ m.role }}]{{ m.content }}"
    "{%- if m.reasoning_content -%}<think>{{ m.reasoning_content }}</think>{%- endif -%}"
    "{%- for call in m.tool_calls or [] -%}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{%- endfor -%}{%- if m.role == 'tool' -%}({{ m.name }} {{ m.tool_call_id }}){%- endif -%}"
    "{%- endfor -%}[assistant]{%- if enable_thinking -%}<think>\n{%- endif -%}"
)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern 😀"}}\n</tool_call>'
TEXTS = (
    "the cat sat on the mat",
    "def main(): return 0",
    "grüße, 世界 😀 hello world",
    "a b c d e",
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make_byte_level_tokenizer(
    chat_template: str | None = CHAT_TEMPLATE, more: Sequence[str] = ()
) -> Tokenizer:
    """As GPT-2, Qwen, Llama 3: tokens are byte strings; ``more`` are special ones."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320 + len(more),
        special_tokens=[*SPECIAL, *more],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    special = {"eos_token": "<|endoftext|>"}
    return Tokenizer(backend, special_tokens=special, chat_template=chat_template)


def make_byte_fallback_tokenizer() -> Tokenizer:
    """As Llama 2 and Gemma: words with a space mark, bytes for what the vocabulary lacks."""
    words = ["▁the", "▁cat", "sat", "▁", "a", "b", "世", "s", "▁▁", "�", "e\u0301"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend)


def make_metaspace_tokenizer() -> Tokenizer:
    """As T5: a unigram vocabulary whose decoder strips the first space."""
    words = ["▁the", "▁cat", "sat", "▁", "a", "b", "世", "s", "▁▁"]
    backend = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), *((w, -1.0) for w in words)], 0))
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend)


def make_word_piece_tokenizer() -> Tokenizer:
    """As BERT: continuations are marked, punctuation is joined."""
    words = ["[UNK]", "the", "cat", "##s", "##sat", ".", ",", "'", "n't", "do"]
    vocab = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return Tokenizer(backend)
