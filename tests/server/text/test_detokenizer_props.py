"""Text leaves the detokenizer whole.

Method: for vocabularies of four kinds and arbitrary ids in arbitrary portions, the pieces put
together equal the decoding of the whole by the tokenizers library itself, which never saw them
apart; and no piece ends in a part of a character.
"""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocabularies import (
    make_byte_fallback_tokenizer,
    make_byte_level_tokenizer,
    make_metaspace_tokenizer,
    make_word_piece_tokenizer,
)

from tandem.models.tokenizing.tokenizer import Tokenizer

TOKENIZERS = {
    "byte_level": make_byte_level_tokenizer(),
    "byte_fallback": make_byte_fallback_tokenizer(),
    "metaspace": make_metaspace_tokenizer(),
    "word_piece": make_word_piece_tokenizer(),
}
EMOJI = "a😀b👩‍👩‍👧世\u0301ÿ"
kinds = pytest.mark.parametrize("kind", TOKENIZERS)


def portions(ids: list[int], cuts: list[int]) -> list[list[int]]:
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in pairwise(bounds)]


def whole(tokenizer: Tokenizer, ids: list[int], *, skip: bool = False) -> str:
    return tokenizer._backend.decode(ids, skip_special_tokens=skip)


@kinds
@given(data=st.data())
def test_pieces_make_the_whole(kind, data):
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24))
    cuts = data.draw(st.lists(st.integers(0, 24), max_size=24))
    skip = data.draw(st.booleans())
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    pieces = [detokenizer.feed(portion) for portion in portions(ids, cuts)]
    assert "".join(pieces) + detokenizer.flush() == whole(tokenizer, ids, skip=skip)


@kinds
@given(data=st.data())
def test_a_continuation_reads_as_after_its_prompt(kind, data):
    tokenizer = TOKENIZERS[kind]
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=12)
    prompt, answer = data.draw(ids), data.draw(ids)
    # A prompt that ends inside a character has no text of its own to compare with.
    prompt_text = whole(tokenizer, prompt)
    if "�" in prompt_text[-1:] or any(tokenizer._is_byte(i) for i in prompt[-1:]):
        return
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False, context=prompt)
    text = "".join(detokenizer.feed([i]) for i in answer) + detokenizer.flush()
    assert prompt_text + text == whole(tokenizer, prompt + answer)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_an_emoji_split_over_tokens_comes_out_whole(kind):
    tokenizer = TOKENIZERS[kind]
    if kind == "byte_level":
        ids = [i for byte in EMOJI.encode() for i in _ids_of_byte(tokenizer, byte)]
    else:
        ids = [tokenizer._backend.token_to_id(f"<0x{byte:02X}>") for byte in EMOJI.encode()]
    assert len(ids) == len(EMOJI.encode())
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.feed([i]) for i in ids]
    assert not any("�" in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == EMOJI


def _ids_of_byte(tokenizer: Tokenizer, byte: int) -> list[int]:
    return [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([byte])]


def test_a_character_cut_off_by_the_end_is_marked():
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = tokenizer.detokenizer()
    ids = [_ids_of_byte(tokenizer, byte)[0] for byte in "😀".encode()[:3]]
    assert detokenizer.feed(ids) == ""
    assert detokenizer.flush() == "�"


@given(st.integers(0, 319))
def test_token_bytes_are_what_the_library_decodes(token_id):
    tokenizer = TOKENIZERS["byte_level"]
    token_id %= tokenizer.vocab_size
    assert tokenizer.token_text(token_id) == whole(tokenizer, [token_id])
