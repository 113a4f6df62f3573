"""Goal: a recipe whose model is one GGUF file trains as one whose model is the folder.

Method: the demo model's file, whose metadata has the tokenizer, beside the folder that it was made
of; ids, texts and special tokens must be the same.
"""

import json

import pytest
from transformers import AutoTokenizer

from demo_file import MESSAGES, make_folder, write_file
from tandem.finetune.data.templates import load_tokenizer, make_template
from tandem.finetune.recipes.recipe import make_recipe
from tandem.finetune.training.trainer import finetune
from tandem.models.families import open_checkpoint


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder, and the file that has all of it."""
    folder = make_folder(tmp_path_factory.mktemp("model"))
    return folder, write_file(folder)


def test_the_tokenizer_is_the_files_own(made):
    folder, file = made
    wanted, found = AutoTokenizer.from_pretrained(folder), load_tokenizer(open_checkpoint(file))
    for text in ("", "def f(x):\n    return 12345  # it's", "<|im_start|>user\nhé 😀<|im_end|>\n"):
        for framed in (True, False):
            ids = wanted(text, add_special_tokens=framed)["input_ids"]
            assert found(text, add_special_tokens=framed)["input_ids"] == ids
        assert found.decode(ids) == wanted.decode(ids)
    assert found.chat_template == wanted.chat_template
    assert found.eos_token_id == found.pad_token_id == wanted.pad_token_id
    prompt = make_template(wanted).encode_prompt(MESSAGES)
    assert make_template(found).encode_prompt(MESSAGES) == prompt != []


def test_a_recipe_trains_on_the_file(made, make_values, tmp_path):
    _, file = made
    values = make_values(
        tmp_path / "out", model_name_or_path=str(file), max_steps=1, plot_loss=False
    )
    report = finetune(make_recipe(values))
    assert report.num_examples == 10
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(file)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template is not None
