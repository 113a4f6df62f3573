"""The demo model's recipe (`examples/demo_model`) and the folder that ships in the package.

The recipe stands alone: its modules are imported from their folder, as its command does, and are
taken out of `sys.modules` again, for their names are short.
"""

import importlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "examples" / "demo_model"
SHIPPED = ROOT / "src" / "tandem" / "models" / "demo"
MODULES = ("corpus", "tokenizer", "trigram", "model", "optimizer", "recipe", "stream")
MAX_PARAMETERS = 9_000_000
MAX_FOLDER_BYTES = 20_000_000
# The recipe promises to beat the trigram clearly: by a fifth of its loss.
MAX_LOSS_RATIO = 0.8

pytest.importorskip("transformers", reason="the demo model needs the `serve` extra")
torch = pytest.importorskip("torch", reason="the demo model needs the `serve` extra")


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(RECIPE))
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(RECIPE))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def shipped_tokenizer():
    if not SHIPPED.exists():
        pytest.skip(f"{SHIPPED.relative_to(ROOT)} is missing: run examples/demo_model/train.py")
    return importlib.import_module("transformers").AutoTokenizer.from_pretrained(SHIPPED)


@pytest.fixture(scope="module")
def metrics() -> dict:
    if not SHIPPED.exists():
        pytest.skip(f"{SHIPPED.relative_to(ROOT)} is missing: run examples/demo_model/train.py")
    return json.loads((SHIPPED / "metrics.json").read_text())


class TestCorpus:
    """Goal: the same text on every machine. Method: fixed answers, and a small tree of files."""

    def test_split_depends_on_the_path_alone(self, modules: dict[str, ModuleType]) -> None:
        is_held_out = modules["corpus"].is_held_out
        held_out = ("ast.py", "locale.py", "venv/__init__.py", "unittest/loader.py")
        assert all(is_held_out(name) for name in held_out)
        assert not any(is_held_out(name) for name in ("os.py", "json/decoder.py", "queue.py"))
        share = sum(is_held_out(f"package/module_{i}.py") for i in range(10_000)) / 10_000
        assert 0.02 < share < 0.04

    def test_reads_sorted_and_leaves_out_what_is_not_code(
        self, modules: dict[str, ModuleType], tmp_path: Path
    ) -> None:
        code = "def f(value):\n    return value\n" * 20
        contents = {
            "zebra.py": code + "# z\n",
            "apple/core.py": code + "# a\n",
            "copy.py": code + "# z\n",
            "table.py": "VALUES = [" + "12345, " * 200 + "]\n",
            "short.py": "pass\n",
            "long.py": code * 20,
            "site-packages/other.py": code,
        }
        for name, text in contents.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        (tmp_path / "latin.py").write_bytes(code.encode() + b"# \xe9\n")
        files = modules["corpus"].read_corpus(2000, tmp_path)
        assert [file.path for file in files] == ["apple/core.py", "copy.py"]

    def test_chats_join_to_whole_functions(self, modules: dict[str, ModuleType]) -> None:
        body = '    def get(self, key):\n        """Return the value of the key."""\n'
        text = f"class Table:\n{body}        value = self.values[key]\n        return value\n"
        file = modules["corpus"].SourceFile("table.py", text, False, False)
        for seed in range(20):
            (chat,) = modules["corpus"].build_chats([file], random.Random(seed))
            request, answer = chat[-2:]
            assert (request["role"], answer["role"]) == ("user", "assistant")
            lead, _, start = request["content"].partition("\n")
            whole = start + answer["content"] if lead.startswith("Con") else answer["content"]
            if lead.startswith(("Continue", "Complete")):
                whole = start + answer["content"]
            compile(whole, "answer", "exec")
            assert "Return the value" in whole or "return the value" in whole


class TestTrigram:
    """Goal: a fair baseline. Method: it is a distribution, and it finds what there is to find."""

    def test_probabilities_sum_to_one(self, modules: dict[str, ModuleType]) -> None:
        vocab_size = 30
        tokens = np.random.default_rng(0).integers(0, 20, 2000)
        trigram = modules["trigram"].Trigram(tokens, vocab_size)
        for context in ((3, 7), (0, 0), (25, 7), (3, 25), (29, 29)):
            scores = [trigram.score(np.array([*context, word])) for word in range(vocab_size)]
            assert np.exp(scores).sum() == pytest.approx(1.0, abs=1e-9)

    def test_learns_a_cycle(self, modules: dict[str, ModuleType]) -> None:
        tokens = np.tile(np.arange(10), 100)
        trigram = modules["trigram"].Trigram(tokens, 16)
        assert np.exp(trigram.score(tokens)).min() > 0.9


class TestModel:
    """Goal: the hand-written gradients are right. Method: against autograd on plain formulas."""

    def test_fused_loss_matches_autograd(self, modules: dict[str, ModuleType]) -> None:
        model = modules["model"]
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2500, 16, generator=generator, requires_grad=True)
        weight = torch.randn(40, 16, generator=generator, requires_grad=True)
        targets = torch.randint(40, (2500,), generator=generator)
        expected = torch.nn.functional.cross_entropy(x @ weight.t(), targets)
        wanted = torch.autograd.grad(expected * 3, (x, weight))
        loss = model._LinearCrossEntropy.apply(x, weight, targets)
        found = torch.autograd.grad(loss * 3, (x, weight))
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(found, wanted)

    def test_experts_match_a_loop_over_tokens(self, modules: dict[str, ModuleType]) -> None:
        model = modules["model"]
        torch.manual_seed(0)
        shape = model.Shape(hidden_size=12, expert_size=6, num_experts=5, top_k=2)
        block = model.MoeBlock(shape, 0.3, 0.3)
        x = torch.randn(17, 12, requires_grad=True)
        parameters = [x, *block.parameters()]
        wanted = torch.autograd.grad(_run_experts_slowly(block, x).square().sum(), parameters)
        found = torch.autograd.grad(block(x).square().sum(), parameters)
        torch.testing.assert_close(found, wanted)

    def test_muon_makes_orthogonal_steps(self, modules: dict[str, ModuleType]) -> None:
        x = torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(0))
        values = torch.linalg.svdvals(modules["optimizer"].orthogonalize(x))
        # The quintic aims at the neighbourhood of one, not at one.
        assert values.min() > 0.5 and values.max() < 1.5


def _run_experts_slowly(block, x):
    probs = (x @ block.gate.weight.t()).softmax(-1)
    rows = []
    for row, scores in zip(x, probs, strict=True):
        weights, ids = scores.topk(block.shape.top_k)
        total = 0
        for weight, i in zip(weights / weights.sum(), ids.tolist(), strict=True):
            gate, up = (block.experts.gate_up_proj[i] @ row).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            total = total + weight * (block.experts.down_proj[i] @ inner)
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.slow
class TestToyRun:
    """Goal: the whole recipe runs. Method: its command, at toy size, in processes of its own."""

    def test_end_to_end_and_resumed(self, tmp_path: Path) -> None:
        whole = _run_toy(tmp_path / "whole")
        _run_toy(tmp_path / "killed", "--stop-at", "10")
        resumed = _run_toy(tmp_path / "killed")
        assert whole["training"]["num_steps"] == resumed["training"]["num_steps"] == 30
        assert whole["training"]["losses"] == resumed["training"]["losses"]
        assert whole["losses"] == resumed["losses"]
        first, last = (whole["training"]["losses"][i][1] for i in (0, -1))
        assert last < first
        names = {path.name for path in (tmp_path / "whole" / "model").iterdir()}
        assert names == {
            "config.json",
            "generation_config.json",
            "metrics.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        }


def _run_toy(out: Path, *options: str) -> dict:
    command = [sys.executable, str(RECIPE / "train.py"), "--toy", "--out", str(out), *options]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    return json.loads((out / "model" / "metrics.json").read_text())


class TestShippedFolder:
    """Goal: what ships is what was promised. Method: its files and its own record of the run."""

    def test_beats_the_trigram(self, metrics: dict) -> None:
        losses = metrics["losses"]
        served = losses["exported_weights_bfloat16_compute"]["nats_per_token"]
        assert served <= MAX_LOSS_RATIO * losses["trigram"]["nats_per_token"]
        assert abs(served - losses["model_float32"]["nats_per_token"]) < 0.02

    def test_recipe_was_finished_within_its_time(self, metrics: dict) -> None:
        assert metrics["training"]["num_steps"] == metrics["recipe"]["num_steps"]
        assert metrics["training"]["cpu_s"] + metrics["other_cpu_s"] <= 2 * 45 * 60

    def test_every_expert_is_used(self, metrics: dict) -> None:
        assert min(min(shares) for shares in metrics["expert_load"]) > 0.02

    def test_is_small_and_in_hub_layout(self, metrics: dict) -> None:
        from safetensors import safe_open

        assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= MAX_FOLDER_BYTES
        config = json.loads((SHIPPED / "config.json").read_text())
        assert config["architectures"] == ["Qwen3MoeForCausalLM"]
        with safe_open(SHIPPED / "model.safetensors", "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            assert {piece.get_dtype() for piece in slices.values()} == {"BF16"}
            size = sum(int(np.prod(piece.get_shape())) for piece in slices.values())
        assert size == metrics["num_parameters"] <= MAX_PARAMETERS
        assert "model.layers.0.mlp.experts.0.gate_proj.weight" in slices
        assert "lm_head.weight" not in slices

    @given(st.text())
    @example("def f(x):\r\n\treturn  x\n\n\n        y ")
    @example("\u00e9\u0301 \ufeff \u2028 \U0001f40d <|im_end|> __init__ 0123")
    def test_tokenizer_round_trips(self, shipped_tokenizer, text: str) -> None:
        ids = shipped_tokenizer(text, add_special_tokens=False).input_ids
        assert shipped_tokenizer.decode(ids) == text

    def test_chat_template_matches_training(
        self, shipped_tokenizer, modules: dict[str, ModuleType]
    ) -> None:
        messages = [
            {"role": "system", "content": "Answer with code."},
            {"role": "user", "content": "Write a function f."},
            {"role": "assistant", "content": "def f():\n    pass\n"},
            {"role": "user", "content": [{"type": "text", "text": "Write another."}]},
        ]
        text = shipped_tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        flat = [*messages[:3], {"role": "user", "content": "Write another."}]
        trained = modules["tokenizer"].render_chat(flat)
        assert text == trained + "<|im_start|>assistant\n"
        ids = shipped_tokenizer(text, add_special_tokens=False).input_ids
        assert len(ids) < len(text) / 2
