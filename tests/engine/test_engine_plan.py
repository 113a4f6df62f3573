"""Goal: a plan decides threads and memory from the model and the machine, and says why."""

import logging

import pytest

from tandem._native import read_topology, recommend_threads
from tandem.engine.build import plan_engine
from tandem.engine.config import EngineConfig
from tandem.models.config import ModelConfig


def plan(threads=0, **model):
    return plan_engine(ModelConfig(path="demo", **model), EngineConfig(threads=threads))


def test_native_models_share_their_work_and_torch_does_not():
    native = plan(dtype="bfloat16")
    assert native.config.threads == recommend_threads(read_topology()).threads
    assert (native.torch_threads, native.torch_threads_reason) == (
        1,
        "all matrices run on native kernels",
    )
    small = plan(dtype="float32")
    assert small.torch_threads == 1
    assert "too few to share" in small.torch_threads_reason
    mixed = plan(dtype="bfloat16", linear_format="none")
    assert "native" not in mixed.torch_threads_reason


def test_a_wish_for_too_many_threads_is_warned_about(caplog):
    advised = recommend_threads(read_topology()).threads
    with caplog.at_level(logging.WARNING):
        assert plan(threads=advised).config.threads == advised
        assert not caplog.records
        assert plan(threads=advised + 3).config.threads == advised + 3
    assert f"event=many_threads threads={advised + 3} advised={advised}" in caplog.text


@pytest.mark.parametrize("expert_format", ["int8", "int4"])
def test_formats_leave_more_memory(expert_format):
    plain, packed = plan(dtype="bfloat16"), plan(dtype="bfloat16", expert_format=expert_format)
    assert packed.weight_bytes < plain.weight_bytes
    rows = {what: (value, why) for what, value, why in packed.rows()}
    assert rows["experts"] == (packed.expert_format, "as asked for")
