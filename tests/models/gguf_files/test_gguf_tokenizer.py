"""Goal: text becomes the tokens that the model was trained with, from the metadata alone.

Method: byte-level tokenizers with the published patterns, and SentencePiece models trained here,
are written as llama.cpp's converter writes them and read back; ids must be those of ``tokenizers``
with the pattern itself, and of SentencePiece, on texts that hit every branch.
"""

import io
import json

import gguf
import pytest
import sentencepiece
import tokenizers
from gguf_vocabularies import BYTE, CONTROL, NORMAL, UNKNOWN, byte_level
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from transformers import GemmaTokenizer

from tandem.core.errors import ConfigError, CorruptionError, NotFoundError, UnsupportedError
from tandem.models.gguf.tokenizer import find_end_tokens, load_gguf_tokenizer
from tandem.models.sources.gguf_files import GgufFiles
from tandem.models.tokenizing.grammars import ExactEncoder, list_vocabulary
from tandem.models.tokenizing.splittings import SPLITTINGS
from tandem.models.tokenizing.tokenizer import load_tokenizer

TEXTS = [
    "",
    "Hello, world! It's 12345 o'clock; we'LL see.",
    "  two  spaces\tand\n\nlines \r\n end  ",
    "naïve Ünïcödé, e\u0301 世界 日本語 한국어 🙂👩‍👩‍👧",
    "def f(x):\n    return x**2 + 3.14159e-7  # CamelCase_snake\n",
    "<|im_start|>user\nhi<|im_end|>",
    "\u2581lower one eighth block, \x00 and \ufffd",
]
CORPUS = [*TEXTS, "the quick brown fox jumps over the lazy dog " * 3, "12 123 1234 it's we'll"]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_CPP = """
default minicpm5 llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano
deepseek-llm deepseek-coder deepseek-v3 spark2_5 youtu falcon mpt starcoder gpt-2 phi-2 jina-es
jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jais-2 gemma4
granite-embed-multi-311m sarvam-moe jina-v1-en jina-v2-code roberta-bpe whitespace refact command-r
qwen2 deepseek-r1-qwen kormo f2llmv2 qwen35 stablelm2 olmo dbrx smaug-bpe poro-chat chatglm-bpe glm4
glm5 viking jais tekken smollm codeshell bloom gpt3-finnish exaone exaone4 exaone-moe chameleon
minerva-7b megrez gpt-4o llama4 kanana2 talkie granite-embed-multi-97m tiny_aya cohere2moe superbpe
trillion granite-docling bailingmoe bailingmoe2 llada-moe seed-coder hunyuan hunyuan-dense hy_v4
joyai-llm kimi-k2 ufakzeka grok-2 afmoe laguna minimax-m2 solar-open mellum2
"""
"""The names that llama.cpp knows, in the order of its ``llama-vocab.cpp``."""
PUBLISHED = {
    "llama-bpe": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL,
    "qwen2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _TAIL,
    "gpt-4o": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
"""Patterns as the ``tokenizer.json`` of Llama 3, Qwen2 and gpt-oss have them."""


def write(path, *adds, architecture="llama"):
    writer = gguf.GGUFWriter(path, architecture)
    for add in adds:
        add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return ``train(pattern)``: the path of a ``tokenizer.json`` that splits text by it."""

    def train(pattern: str | None, *, keeps_whole: bool = False):
        backend = tokenizers.Tokenizer(models.BPE(ignore_merges=keeps_whole))
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
        split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
        backend.pre_tokenizer = pre_tokenizers.Sequence([*split, last])
        backend.decoder = decoders.ByteLevel()
        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        backend.train_from_iterator(
            CORPUS,
            trainers.BpeTrainer(
                vocab_size=400,
                special_tokens=special,
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            ),
        )
        path = tmp_path_factory.mktemp("json") / "tokenizer.json"
        backend.save(str(path))
        return path

    return train


def test_gemma4_has_merges_and_spaces_of_sentencepiece(tmp_path):
    """Ids are those of ``GemmaTokenizer`` of transformers with the same vocabulary."""
    trainer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    trainer.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer.train_from_iterator(
        CORPUS[7:],
        trainers.BpeTrainer(vocab_size=340, special_tokens=special, show_progress=False),
    )
    parts = json.loads(trainer.to_str())["model"]
    vocabulary, merges = parts["vocab"], [tuple(pair) for pair in parts["merges"]]
    theirs = GemmaTokenizer(vocab=vocabulary, merges=merges)

    def add(writer):
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(list(vocabulary))
        kinds = [CONTROL] * 3 + [UNKNOWN] + [BYTE] * 256 + [NORMAL] * (len(vocabulary) - 260)
        writer.add_token_types(kinds)
        writer.add_token_merges([" ".join(pair) for pair in merges])
        writer.add_bos_token_id(2)
        writer.add_eos_token_id(1)
        writer.add_unk_token_id(3)
        writer.add_add_bos_token(True)

    assert list(vocabulary.values()) == list(range(len(vocabulary)))
    ours = load_gguf_tokenizer(write(tmp_path / "x.gguf", add, architecture="gemma4")).backend
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == [2, *theirs(text, add_special_tokens=False)["input_ids"]], text
        assert ours.decode(ids) == text.replace("\u2581", " ")


@pytest.mark.parametrize("pre", [*PUBLISHED, "gpt-2"])
def test_byte_level_ids_are_those_of_the_published_pattern(pre, trained, tmp_path):
    path = trained(PUBLISHED.get(pre), keeps_whole=pre == "llama-bpe")
    theirs = tokenizers.Tokenizer.from_file(str(path))
    ours = load_gguf_tokenizer(write(tmp_path / "x.gguf", byte_level(path, pre))).backend
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        if pre == "qwen2":
            # Qwen2 normalizes; the trained one does not.
            text = tokenizers.normalizers.NFC().normalize_str(text)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_patterns_of_all_names_compile(trained, tmp_path):
    path = trained(None)
    assert set(LLAMA_CPP.split()) <= SPLITTINGS.keys()
    for pre, splitting in SPLITTINGS.items():
        if splitting.form != "bytes":
            continue
        backend = load_gguf_tokenizer(write(tmp_path / "x.gguf", byte_level(path, pre))).backend
        for text in TEXTS:
            ids = backend.encode(text, add_special_tokens=False).ids
            is_nfc = SPLITTINGS[pre].is_nfc
            wanted = tokenizers.normalizers.NFC().normalize_str(text) if is_nfc else text
            assert backend.decode(ids, skip_special_tokens=False) == wanted


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        (
            "deepseek-llm",
            ["Add", " Ü", "ber", "\u0531", "\u0561", ";", " ", "123", "\n", "你好", " !?", "  "],
        ),
        ("kimi-k2", ["It's", " Über", "123", "4", "你好", "ABc", " !?\n", "  "]),
        ("default", ["Hi", "!", " ", "123", "456", "7", " x", "=", "1", "\n\n"]),
        ("falcon", ["Hi", "!`", " ", "123", "456", "7", " x", "\n"]),
        ("afmoe", ["It", "'s", " ", "1", "234", "567", "日本ไ", "é", " !?\n"]),
        ("superbpe", ["a 't is ", "1", "234", "567", " of it\n", "12"]),
        ("tiny_aya", ["Ab's", " ", "12", "345", " x"]),
        ("bailingmoe", ["It", "'s", " a", "1", "2", " !!\n\n", "b"]),
        ("seed-coder", [" !!", "\n\n", "x", "1"]),
        ("ufakzeka", ["Ankara", "'da", " '", "s"]),
        ("laguna", ["a", " ", "\n\n", " ", " b", "1"]),
        ("bloom", ["ab1", " x", ". ,", "y"]),
        ("viking", ["ab", "1", "2", " x", "."]),
        ("jais-2", ["a", "    ", "  ", " b", "12"]),
        ("minicpm5", ["a", "123", "4", " b"]),
        ("exaone-moe", ["a b c", "1", " !/\n", "\n", "b"]),
        ("chameleon", ["a", "  ", "b", "1", "!", "!", "\t", " c"]),
        ("deepseek-coder", ["\n", " ab", " !?", "1", "2", "你好"]),
        ("spark2_5", ["1", "2", "3", "4", " !", "\n", "\n", ".a"]),
        ("youtu", ["한국", "！", "日", "a", "1", "2"]),
        ("qwen35", ["e\u0301a", "1", " \u0964", " x"]),
        ("command-r", ["a", " ", "1", "2", " b"]),
    ],
)
def test_text_is_split_as_published(pre, pieces, trained, tmp_path):
    """DeepSeek-V2's list of signs has ASCII's letters in it, its list of letters no small Armenian
    ones; Kimi's Chinese stands alone."""
    path = trained(None)
    backend = load_gguf_tokenizer(write(tmp_path / "x.gguf", byte_level(path, pre))).backend
    text = "".join(pieces)
    found = backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in found] == pieces


def test_vocabularies_of_texts(tmp_path):
    """Tokens that do not spell bytes: of words, and with SentencePiece's marked spaces."""

    def add(pre, tokens, merges):
        def write_to(writer):
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre(pre)
            writer.add_token_list(tokens)
            writer.add_token_merges(merges)

        return write_to

    words = ["世", "界", "a", "世界"]
    path = write(tmp_path / "x.gguf", add("whitespace", words, ["世 界"]))
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("世界 a 世") == [3, 2, 0]
    assert tokenizer.decode([3, 2]) == "世界a"
    pieces = ["<unk>", "\u2581", "a", "\u2581a"]
    path = write(tmp_path / "x.gguf", add("sarvam-moe", pieces, ["\u2581 a"]))
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("a a") == [2, 3]
    assert tokenizer.decode([2, 3]) == "a a"


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no prefix"])
def pieces(request):
    """A SentencePiece BPE model with byte fallback; Llama's adds a space, Gemma's does not."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3),
        model_writer=model,
        vocab_size=380,
        model_type="bpe",
        byte_fallback=True,
        add_dummy_prefix=request.param,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def add_pieces(pieces, *, has_prefix):
    """As the converter adds a ``tokenizer.model``."""

    def kind(i):
        if pieces.IsUnknown(i):
            return UNKNOWN
        if pieces.IsControl(i):
            return CONTROL
        return BYTE if pieces.IsByte(i) else NORMAL

    ids = range(pieces.GetPieceSize())

    def add(writer):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([pieces.IdToPiece(i) for i in ids])
        writer.add_token_scores([pieces.GetScore(i) for i in ids])
        writer.add_token_types([kind(i) for i in ids])
        writer.add_unk_token_id(pieces.unk_id())
        writer.add_bos_token_id(pieces.bos_id())
        writer.add_eos_token_id(pieces.eos_id())
        writer.add_add_space_prefix(has_prefix)

    return add


def test_sentencepiece_ids_are_its_own(pieces, tmp_path):
    """Merges follow from scores; what is no piece becomes bytes; text begins with BOS."""
    has_prefix = pieces.EncodeAsPieces("x")[0].startswith("\u2581")
    path = write(tmp_path / "x.gguf", add_pieces(pieces, has_prefix=has_prefix))
    ours = load_gguf_tokenizer(path).backend
    for text in TEXTS[:-1]:
        ids = ours.encode(text).ids
        assert ids == [pieces.bos_id(), *pieces.EncodeAsIds(text)], text
        assert ours.decode(ids) == text
        assert ours.encode(text, add_special_tokens=False).ids == ids[1:]
    # What a grammar leaves no choice of is written without a space before it.
    tokenizer = load_tokenizer(path)
    encode = ExactEncoder(tokenizer, list_vocabulary(tokenizer, tokenizer.vocab_size, [2]))
    for text in (*TEXTS, "x", " x", "<s>", "\U0001f642"):
        assert b"".join(map(tokenizer.token_bytes, encode(text))) == text.encode(), text


def test_phi_3_drops_blanks_after_its_added_tokens(pieces, tmp_path):
    """As its ``tokenizer.json`` says and its metadata cannot; the start of a text keeps them."""
    add = add_pieces(pieces, has_prefix=False)
    for architecture, is_dropped in (("phi3", True), ("llama", False)):
        ours = load_gguf_tokenizer(
            write(tmp_path / "x.gguf", add, architecture=architecture)
        ).backend
        for token, has_dropped in (("</s>", is_dropped), ("<s>", False)):
            ids = [ours.encode(f"{token}{blanks}lazy").ids for blanks in ("", " \n ")]
            assert (ids[0] == ids[1]) is has_dropped, (architecture, token)


def test_the_ends_of_a_text_are_added_tokens_whatever_their_type(trained, tmp_path):
    """In old files they are of the type of other tokens."""

    def without_types(writer):
        add_types = writer.add_token_types
        writer.add_token_types = lambda types: add_types([NORMAL] * len(types))
        byte_level(trained(None), "gpt-2", bos=1, eos=0)(writer)

    ours = load_gguf_tokenizer(write(tmp_path / "x.gguf", without_types)).backend
    assert ours.encode("<|endoftext|>").ids == [0]
    assert len(ours.encode("<|im_end|>").ids) > 1


def test_special_tokens_and_template_come_along(trained, tmp_path):
    """``load_tokenizer``, as the server calls it, of the file and of its folder."""
    path = trained(None)
    file = write(
        tmp_path / "x.gguf",
        byte_level(path, "gpt-2", bos=1, eos=0, pad=0),
        lambda writer: writer.add_add_bos_token(True),
        lambda writer: writer.add_chat_template(
            [
                {"name": "default", "template": "{{ messages }}"},
                {"name": "tool_use", "template": "{{ tools }}"},
            ]
        ),
    )
    for place in (file, tmp_path):
        loaded = load_tokenizer(place)
        assert loaded.special_tokens == {
            "bos_token": "<|im_start|>",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
        }
        assert (loaded.chat_template, loaded.tool_template) == ("{{ messages }}", "{{ tools }}")
        assert loaded.encode("hi")[0] == 1
        assert loaded.encode("hi", add_special_tokens=False)[0] != 1
        assert loaded.decode([1, 0], skip_special_tokens=True) == ""


def test_a_file_that_does_not_say_how_text_is_split_is_warned_of(trained, tmp_path, caplog):
    path = trained(None)
    for pre, names in (("gpt-2", []), (None, ["x.gguf"])):
        caplog.clear()
        load_gguf_tokenizer(write(tmp_path / "x.gguf", byte_level(path, pre)))
        assert [name for r in caplog.records for name in names if name in r.getMessage()] == names
        assert len(caplog.records) == len(names)


def test_files_of_the_folder_go_before_the_metadata(trained, tmp_path):
    """A named folder's own tokenizer is what counts."""
    path = trained(None)
    write(tmp_path / "x.gguf", byte_level(path, "no such pattern"))
    (tmp_path / "tokenizer.json").write_bytes(path.read_bytes())
    assert load_tokenizer(tmp_path).vocab_size == load_tokenizer(path.parent).vocab_size


def test_all_ends_of_a_turn_are_found(trained, tmp_path):
    """The end that the file names, and control tokens that end a turn in other files."""
    path = write(tmp_path / "x.gguf", byte_level(trained(None), "gpt-2", eos=0))
    assert find_end_tokens(GgufFiles.open(path).metadata, "llama") == [0, 2]


@pytest.mark.parametrize(
    ("add", "error", "text"),
    [
        (lambda w: w.add_tokenizer_model("gpt2"), ConfigError, "no tokenizer: name a folder"),
        (
            lambda w: (w.add_tokenizer_model("t5"), w.add_token_list(["a"])),
            UnsupportedError,
            "kind 't5'",
        ),
        (
            lambda w: (w.add_tokenizer_model("gpt2"), w.add_token_list(["a", "a"])),
            CorruptionError,
            "'a' is in .* twice",
        ),
        (
            lambda w: (w.add_tokenizer_model("gpt2"), w.add_token_list(["a"])),
            ConfigError,
            "no merges",
        ),
        (
            lambda w: (
                w.add_tokenizer_model("gpt2"),
                w.add_token_list(["a"]),
                w.add_tokenizer_pre("strange"),
            ),
            UnsupportedError,
            "'strange'",
        ),
        (
            lambda w: (
                w.add_tokenizer_model("gpt2"),
                w.add_token_list(["a"]),
                w.add_token_merges(["b c"]),
            ),
            ConfigError,
            "cannot be built",
        ),
        (
            lambda w: (w.add_tokenizer_model("llama"), w.add_token_list(["a"])),
            ConfigError,
            "scores .* 1 token",
        ),
        (
            lambda w: (
                w.add_tokenizer_model("gpt2"),
                w.add_token_list(["a", "b", "ab"]),
                w.add_token_merges(["a b"]),
                w.add_token_types([1]),
            ),
            ConfigError,
            "token_type",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(add, error, text, tmp_path):
    path = write(tmp_path / "x.gguf", add)
    with pytest.raises(error, match=text):
        load_gguf_tokenizer(path)


def test_a_folder_without_any_tokenizer_is_refused_as_before(tmp_path):
    with pytest.raises(NotFoundError):
        load_tokenizer(tmp_path)
