"""Goal: the kernel benchmarks do not rot.

Method: their own cases at toy size, one round each; every check passes and every figure is there.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tandem.bench.harness import run_cases
from tandem.bench.operators import linear, moe

ALL_SHAPES = list(moe.SHAPES)
TOY_SHAPES = [moe.Shape("toy", 256, 128, 2, 4), moe.Shape("toy-2", 512, 256, 2, 2)]


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    """The rival sets torch's number of threads."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "SHAPES", TOY_SHAPES)
    monkeypatch.setattr(linear, "SHAPES", {"toy": (256, 300), "toy-2": (128, 64)})
    monkeypatch.setattr(linear, "QUICK_SHAPES", ("toy",))
    for module in (moe, linear):
        monkeypatch.setattr(module, "TOTAL_WEIGHTS", 500_000)


@pytest.mark.parametrize("quick", [pytest.param(True, marks=pytest.mark.slow), False])
def test_cases_run_at_toy_size(quick: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(moe, "TOKENS", (4, 30))
    monkeypatch.setattr(linear, "ROWS", (4, 30))
    cases = itertools.chain(moe.make_cases(quick=quick), linear.make_cases(quick=quick))
    records = list(run_cases("kernels", cases, budget_s=5, rounds=1))
    if quick:
        assert len(records) == 3 * len(moe.QUICK_TOKENS) + 3 * len(linear.QUICK_ROWS)
    else:
        assert len(records) == 2 * 2 * (len(moe.FORMATS) + len(linear.FORMATS))
    for record in records:
        assert record.check == "ok", record.case
        assert record.ratio is not None
        assert record.ceiling_fraction is not None
        assert "threads=" in (record.baseline_name or "")


@pytest.mark.parametrize("module", [moe, linear], ids=["moe", "linear"])
def test_a_wrong_result_reports_no_time(module, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "FORMATS", {"int8g128": 1e-6})
    monkeypatch.setattr(module, "QUICK_FORMATS", ("int8g128",))
    cases = module.make_cases(quick=True)
    records = list(run_cases("kernels", cases, patterns=["*tokens=1"], budget_s=5, rounds=1))
    assert [record.ours for record in records] == [None]
    assert "relative error" in records[0].check


def test_large_shapes_have_as_many_experts_as_memory_holds():
    shapes = {shape.name: shape for shape in ALL_SHAPES}
    small, large = shapes["qwen3-30b-a3b"], shapes["deepseek-v3"]
    for free_gib in (1, 1000):
        assert moe.count_experts(small, free_gib << 30, has_peers=False) == 16
    counts = [moe.count_experts(large, n << 30, has_peers=False) for n in (1, 16, 64, 10_000)]
    assert counts == [8, 24, 97, 256]
    for free_gib in (16, 64):
        held = moe.count_experts(large, free_gib << 30, has_peers=True)
        assert 8 <= held < moe.count_experts(large, free_gib << 30, has_peers=False)
        assert held * 14 * 3 * large.hidden * large.inner <= free_gib << 29
    assert moe.count_experts(shapes["mixtral"], 1000 << 30, has_peers=False) == 8


def test_case_names_are_those_people_ask_for():
    names = {case.name for case in moe.make_cases(quick=False)}
    assert "op=moe format=int8g128 shape=toy tokens=4096" in names
    assert {shape.name for shape in ALL_SHAPES} == {
        "qwen3-30b-a3b",
        "deepseek-v3",
        "kimi-k2",
        "mixtral",
    }
    words = [dict(word.split("=") for word in name.split()) for name in names]
    assert {word["format"] for word in words} >= {"int8g128", "int4g32", "bf16", "fp8", "mxfp4"}
    assert {int(word["tokens"]) for word in words} >= {1, 16, 2048, 4096}


def test_cases_that_do_not_match_make_no_weights(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object) -> None:
        raise AssertionError(args)

    monkeypatch.setattr(moe, "_Layers", refuse)
    cases = linear.make_cases(quick=True)
    records = list(run_cases("kernels", cases, patterns=["op=linear*"], budget_s=5, rounds=1))
    assert {record.check for record in records} == {"ok"}


class FakeKtKernel:
    """Answers the calls that the peer's script does; its results are ``factor`` times the right."""

    factor = 1.0

    def __init__(self, python: object, script: str, threads: str, *, settings: object) -> None:
        assert script == "kt_kernel_rival.py"
        assert int(threads) >= 1

    def __enter__(self) -> "FakeKtKernel":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def call(self, name: str, **arguments) -> object:
        return getattr(self, name)(**arguments)

    def load(self, paths: list[str], kind: str, top_k: int, max_tokens: int) -> None:
        assert kind in ("int8", "int4", "bf16")
        self.layers = [load_file(path) for path in paths]

    def take(self, paths: list[str]) -> None:
        self.batches = [load_file(path) for path in paths]
        assert len(self.batches) == len(self.layers)

    def run(self, nth: int) -> float:
        layer = {name: weight.float() for name, weight in self.layers[nth].items()}
        batch = self.batches[nth]
        self.out = torch.zeros(batch["x"].shape)
        for t, x in enumerate(batch["x"].float()):
            for expert, weight in zip(batch["ids"][t], batch["weights"][t], strict=True):
                inner = F.silu(layer["gate"][expert] @ x) * (layer["up"][expert] @ x)
                self.out[t] += weight * (layer["down"][expert] @ inner)
        return 1e-3

    def save(self, path: str) -> None:
        save_file({"out": self.out * self.factor}, path)


@pytest.fixture
def fake_peer(monkeypatch: pytest.MonkeyPatch) -> type[FakeKtKernel]:
    monkeypatch.setattr(moe, "RivalProcess", FakeKtKernel)
    monkeypatch.setattr(moe, "install_rival", lambda *_, **__: Path("python"))
    monkeypatch.setattr(moe, "TOKENS", (20,))
    return FakeKtKernel


def test_the_peer_gets_the_very_same_weights(fake_peer):
    cases = moe.make_cases(quick=False, with_peers=True)
    records = list(run_cases("kernels", cases, budget_s=5, rounds=1))
    assert {record.check for record in records} == {"ok"}
    names = {record.case.split()[1]: record.baseline_name or "" for record in records}
    for word, baseline in names.items():
        name = word.removeprefix("format=")
        kind = moe.KT_KINDS[name] if name in moe.list_kt_kinds() else None
        assert baseline.startswith(f"kt-kernel {kind} " if kind else "torch."), word


def test_a_wrong_result_of_the_peer_reports_no_time(fake_peer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fake_peer, "factor", 1.5)
    cases = moe.make_cases(quick=False, with_peers=True)
    records = list(run_cases("kernels", cases, patterns=["*bf16*"], budget_s=5, rounds=1))
    assert [record.ours for record in records] == [None, None]
    assert all("kt-kernel bf16: relative error" in record.check for record in records)
