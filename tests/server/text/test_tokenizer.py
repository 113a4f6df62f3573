"""A checkpoint folder gives the tokenizer, template and sampling defaults of its authors."""

import json

import pytest
from tokenizers import decoders
from vocabularies import CHAT_TEMPLATE, make_byte_level_tokenizer

from each import each
from tandem.core.errors import ConfigError, TandemError
from tandem.models.tokenizing.settings import find_end_id
from tandem.models.tokenizing.tokenizer import Tokenizer, load_tokenizer
from tandem.server.api.sampling import choice_seed

TEXT = "the cat, 世界 😀\n<|im_end|>"


@pytest.fixture
def folder(tmp_path, tokenizer):
    tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder, name: str, **content) -> None:
    (folder / name).write_text(json.dumps(content))


def test_round_trip(folder, tokenizer):
    loaded = load_tokenizer(folder)
    ids = loaded.encode(TEXT)
    assert ids == tokenizer.encode(TEXT)
    assert loaded.decode(ids) == TEXT
    assert loaded.decode(ids, skip_special_tokens=True) == TEXT.removesuffix("<|im_end|>")
    assert loaded.chat_template is None
    assert loaded.special_tokens == {}


def test_transformers_reads_the_same(folder):
    transformers = pytest.importorskip("transformers")
    write(
        folder,
        "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    ours = load_tokenizer(folder)
    assert ours.encode(TEXT) == theirs.encode(TEXT)
    assert ours.special_tokens["eos_token"] == theirs.eos_token
    assert ours.chat_template == theirs.chat_template
    messages = [{"role": "user", "content": "hi"}]
    from tandem.server.text.chat_template import ChatTemplate

    template = ChatTemplate(ours.chat_template, ours.special_tokens)
    try:
        text = template.render(messages, {"add_generation_prompt": True})
    finally:
        template.close()
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("adds_bos", [True, False, None])
@pytest.mark.parametrize("adds_eos", [True, False, None])
def test_prompts_are_framed_as_transformers_frames_them(folder, adds_bos, adds_eos):
    transformers = pytest.importorskip("transformers")
    flags = {"add_bos_token": adds_bos, "add_eos_token": adds_eos}
    write(
        folder,
        "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<|im_start|>",
        eos_token="<|endoftext|>",
        **{name: value for name, value in flags.items() if value is not None},
    )
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    ours = load_tokenizer(folder)
    assert ours.encode(TEXT) == theirs.encode(TEXT)
    assert ours.encode("") == theirs.encode("")
    plain = theirs.encode(TEXT, add_special_tokens=False)
    assert ours.encode(TEXT, add_special_tokens=False) == plain


def test_templates_and_special_tokens_in_all_their_forms(folder):
    write(
        folder,
        "tokenizer_config.json",
        eos_token={"content": "<|im_end|>", "lstrip": False},
        bos_token=None,
        add_bos_token=True,
        chat_template=[
            {"name": "tool_use", "template": "tools"},
            {"name": "default", "template": "plain"},
        ],
    )
    loaded = load_tokenizer(folder)
    assert loaded.special_tokens == {"eos_token": "<|im_end|>"}
    assert (loaded.chat_template, loaded.tool_template) == ("plain", "tools")
    (folder / "chat_template.jinja").write_text("from a file")
    loaded = load_tokenizer(folder)
    assert (loaded.chat_template, loaded.tool_template) == ("from a file", "tools")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools from a file")
    assert load_tokenizer(folder).tool_template == "tools from a file"


def test_special_tokens_of_the_older_file(folder):
    """It counts unless the newer file lists the added tokens, as at transformers."""
    transformers = pytest.importorskip("transformers")
    write(folder, "special_tokens_map.json", bos_token={"content": "<|im_start|>"}, x_token="y")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_end|>"}
    listed = {"0": {"content": "<|endoftext|>", "special": True}}
    for more in ({}, {"added_tokens_decoder": listed}):
        write(folder, "tokenizer_config.json", **settings, **more)
        theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
        assert load_tokenizer(folder).special_tokens["bos_token"] == theirs.bos_token
    assert theirs.bos_token == "<|im_end|>"


def test_the_end_token_is_found_in_each_of_the_files(folder):
    assert find_end_id(folder) is None
    write(folder, "special_tokens_map.json", eos_token="<|im_end|>")
    assert find_end_id(folder) == 2
    listed = {"7": {"content": "<|end|>"}, "8": {"content": "x"}}
    write(folder, "tokenizer_config.json", eos_token="<|end|>", added_tokens_decoder=listed)
    assert find_end_id(folder) == 7


@each("decoder", ["ByteLevel", "Sequence", "Fuse"])
def test_added_tokens_of_a_byte_level_vocabulary_are_their_texts(decoder):
    """Also where all their characters stand for bytes in the vocabulary's alphabet (ï is 0xEF), and
    whatever steps follow the decoder of bytes; unless the model has the token (Ġ, a space), too.
    """
    backend = make_byte_level_tokenizer().backend
    backend.add_tokens(["naïve", "<｜Ende｜>", "Ġ"])
    steps = [decoders.ByteLevel(), *([decoders.Fuse()] if decoder == "Fuse" else [])]
    backend.decoder = steps[0] if decoder == "ByteLevel" else decoders.Sequence(steps)
    tokenizer = Tokenizer(backend)
    text = "a naïve<｜Ende｜> 世 ÿ"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_a_broken_folder_is_named(folder, tmp_path_factory):
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(folder)
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(TandemError, match=empty.name):
        load_tokenizer(empty)


def test_seeds_of_choices_differ_and_repeat():
    seeds = {choice_seed(seed, choice) for seed in range(-5, 5) for choice in range(20)}
    assert len(seeds) == 200
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert choice_seed(2**63 - 1, 3) == choice_seed(2**63 - 1, 3)
    assert choice_seed(None, 3) is None


def test_a_checkpoint_without_a_template_has_no_chat():
    from serving import LiveServers

    with LiveServers(make_byte_level_tokenizer(chat_template=None)) as servers:
        live = servers.start()
        body = {"messages": [{"role": "user", "content": "hi"}]}
        reply = live.post("/v1/chat/completions", body)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "messages"
