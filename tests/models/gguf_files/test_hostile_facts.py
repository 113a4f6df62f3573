"""Goal: metadata of a GGUF file may say anything: the file is planned or refused, never a crash.

Method: files of the tiny models of ``test_gguf_families``; one or two numbers of their metadata are
taken away, or made zero, negative, huge, not a number, another type.
"""

import copy
import random

import numpy as np
import pytest
import torch
from gguf_writing import write_model
from test_gguf_families import COMMON, MODELS
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tandem.core.errors import TandemError, UnsupportedError
from tandem.models.gguf import config as gguf_config
from tandem.models.planning.planner import plan_model
from tandem.models.sources.gguf_files import GgufFiles

NAMES = ("dots1", "granitemoe", "cohere2", "lfm2_moe", "ernie4_5_moe", "olmo3")
MORE = ("deepseek_v2", "glm4_moe", "gpt_oss", "kimi_linear", "granitemoehybrid", "stablelm")
GONE = object()
VALUES = (
    GONE, 0, 1, 7, -1, 2**31 - 1, 2**40, 0.0, -1.0, 1e30, float("nan"), float("inf"), "x", True,
    np.array([1, 0, 1], np.int32), np.array([], np.int32),
)  # fmt: skip
FOUND = (
    ("granitemoe", {"granitemoe.logit_scale": 0}),
    ("dots1", {"dots1.expert_group_used_count": 7}),
    ("dots1", {"dots1.expert_group_count": 0}),
)
"""What once ended in an error of Python."""


@pytest.fixture(scope="module")
def get_file(tmp_path_factory):
    """Return ``get(name)``: the GGUF file of a tiny model."""
    files = {}

    def get(name):
        if name not in files:
            model_type, changes = MODELS[name]
            values = copy.deepcopy(COMMON | changes)
            if model_type == "kimi_linear":
                values.pop("rope_parameters")
            config = CONFIG_MAPPING[model_type](**values)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            files[name] = tmp_path_factory.mktemp("hostile") / "model.gguf"
            write_model(model, files[name])
        return files[name]

    return get


class Changed:
    """The files of a model with other metadata."""

    def __init__(self, files, changes):
        self._files = files
        known = files.metadata | changes
        self.metadata = {key: value for key, value in known.items() if value is not GONE}

    def __getattr__(self, name):
        return getattr(self._files, name)


def is_planned(path, changes, monkeypatch):
    """Plan a model; return whether that was possible. Raises: what is no error of ours."""
    files = GgufFiles.open(path)
    changed = Changed(files, changes)
    with monkeypatch.context() as patch:
        patch.setattr(gguf_config.GgufFiles, "open", lambda _path: changed)
        try:
            plan_model(path, dtype="float32")
        except TandemError as error:
            assert str(error)
            return False
    return True


@pytest.mark.parametrize(("name", "changes"), FOUND)
def test_what_was_found_ends_in_no_error_of_python(name, changes, get_file, monkeypatch):
    path = get_file(name)
    assert is_planned(path, {}, monkeypatch)
    is_planned(path, changes, monkeypatch)


def test_a_value_that_changes_the_answer_is_obeyed_or_refused_by_name(get_file, monkeypatch):
    """Tokens that see those after them, for one, would else be answered as if they did not."""
    files = GgufFiles.open(get_file("olmo3"))
    cases = (
        ({}, None),
        ({"attention.causal": True}, None),
        ({"attention.causal": False}, "attention.causal is False"),
        ({"logit_scale": 1.0, "attention.max_alibi_bias": 0.0}, None),
        ({"logit_scale": 0.5}, "logit_scale is 0.5"),
        ({"attn_logit_softcapping": np.array([50.0])}, "attn_logit_softcapping is an array"),
    )
    for values, refusal in cases:
        metadata = files.metadata | {f"{files.architecture}.{k}": v for k, v in values.items()}
        if refusal is None:
            gguf_config.make_config(metadata, files.tensors, {})
            continue
        with pytest.raises(UnsupportedError, match=refusal) as caught:
            gguf_config.make_config(metadata, files.tensors, {})
        assert caught.value.field == f"{files.architecture}.{next(iter(values))}"
    # An architecture that has a scale obeys it.
    assert is_planned(get_file("granitemoe"), {"granitemoe.logit_scale": 3.0}, monkeypatch)


@pytest.mark.parametrize(
    ("names", "count"), [(NAMES, 30), pytest.param(NAMES + MORE, 3000, marks=pytest.mark.slow)]
)
def test_any_metadata_is_planned_or_refused(names, count, get_file, monkeypatch):
    chance, num_planned = random.Random(7), 0
    for _ in range(count):
        name = chance.choice(names)
        path = get_file(name)
        keys = [
            key
            for key in GgufFiles.open(path).metadata
            if not key.startswith(("general.", "tokenizer."))
        ]
        changes = {key: chance.choice(VALUES) for key in chance.sample(keys, chance.choice((1, 2)))}
        try:
            num_planned += is_planned(path, changes, monkeypatch)
        except Exception as error:
            raise AssertionError(f"{name} {changes}") from error
    assert 0 < num_planned < count
