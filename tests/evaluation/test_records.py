"""Goal: `tandem eval` gives the figures of the definitions, by the engine that serves.

Method: transformers computes the demo model's logits in float32; the figures of two weight formats
are computed again in float64 from the logits of the loaded models.
"""

import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.core.errors import CapacityError, ConfigError
from tandem.evaluation.questions import read_questions
from tandem.evaluation.records import evaluate_records
from tandem.evaluation.scores import KeptLogprobs, Scores
from tandem.finetune.data.examples import IGNORED_LABEL
from tandem.kernels.paged import PagedBatch, SequenceChunk
from tandem.models.config import ModelConfig
from tandem.models.families import open_checkpoint
from tandem.models.loading.hub import DEMO_FOLDER
from tandem.models.loading.loader import load_model
from tandem.models.planning.planner import plan_model

ROWS = [
    {"instruction": "def add(a, b):", "output": "return a + b"},
    {"instruction": "def first(items):", "output": "return items[0]\n" * 40},
    7,
]
"""The second is longer than what is scored at a time."""


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS))
    return path


def read(rows):
    return read_questions(
        open_checkpoint("demo"),
        str(rows),
        dataset_dir=rows.parent,
        template=None,
        max_samples=None,
        cutoff_len=2048,
    )


def test_the_figures_of_the_served_model(rows, tmp_path):
    """Perplexity, accuracy and greedy answers are those of transformers on the same weights."""
    config = ModelConfig(path="demo", dtype="float32")
    predictions = tmp_path / "out.jsonl"
    report = evaluate_records(config, str(rows), max_tokens=4, predictions=predictions)
    assert (report.num_rows, report.num_bad_rows, report.missing) == (2, 1, ())
    scores = report.metrics["auto"]
    model = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32).eval()
    asked, loss, count, right = read(rows), 0.0, 0, 0
    assert max(len(e.token_ids) for e in asked.examples) > 256
    with torch.inference_mode():
        for example in asked.examples:
            labels = torch.tensor(example.labels[1:])
            kept = labels != IGNORED_LABEL
            logits = model(torch.tensor([example.token_ids])).logits[0, :-1][kept].double()
            chosen = logits.log_softmax(-1).gather(1, labels[kept, None])
            loss, count = loss - float(chosen.sum()), count + int(kept.sum())
            right += int((logits.argmax(-1) == labels[kept]).sum())
        said = [
            model.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False)[0, len(ids) :]
            for ids in asked.prompts
        ]
    assert scores["perplexity"] == pytest.approx(torch.tensor(loss / count).exp().item(), rel=1e-4)
    assert scores["accuracy"] == pytest.approx(100 * right / count)
    assert "bleu-4" in scores and scores["exact_match"] == 0
    lines = [json.loads(line) for line in predictions.read_text().splitlines()]
    assert [line["predict"] for line in lines] == [asked.decode(ids.tolist()) for ids in said]
    assert lines[0]["label"] == "return a + b"


def compute_logits(weight_format, ids):
    plan = plan_model(
        DEMO_FOLDER, dtype="float32", expert_format=weight_format, linear_format=weight_format
    )
    model = load_model(plan)
    cache = model.allocate_kv(16, block_size=64)
    batch = PagedBatch.build([SequenceChunk(list(ids), 0, list(range(16)), "all")], 64)
    return model.forward(batch, cache)


def test_formats_beside_bf16(rows, monkeypatch):
    """The table has bf16 first; divergence is that of whole distributions; extras are named."""
    for name in ("sacrebleu", "rouge_score"):
        monkeypatch.setitem(sys.modules, name, None)
    words = ["eval", "demo", "--data", str(rows), "--max-tokens", "2", "--dtype", "float32"]
    result = CliRunner().invoke(app, [*words, "--formats", "int4,bf16", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["left_out"] == (
        "sacrebleu, rouge_score not installed: pip install 'tandem-llm[finetune]'"
    )
    bf16, int4 = told["formats"].values()
    assert list(told["formats"]) == ["bf16", "int4"]
    assert (bf16["kl_divergence"], bf16["agreement"]) == (0, 100)
    assert int4["weights_mib"] < bf16["weights_mib"]
    assert not [name for name in int4 if name.startswith(("bleu", "rouge"))]
    divergence, agreed, count = 0.0, 0, 0
    for example in read(rows).examples:
        kept = torch.tensor(example.labels[1:]) != IGNORED_LABEL
        ours, theirs = (
            compute_logits(name, example.token_ids)[:-1][kept].double().log_softmax(-1)
            for name in ("int4", "bf16")
        )
        divergence += float((theirs.exp() * (theirs - ours)).sum())
        agreed += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        count += len(ours)
    assert int4["kl_divergence"] == pytest.approx(divergence / count, rel=1e-3)
    assert int4["kl_divergence"] > 1e-5
    assert int4["agreement"] == pytest.approx(100 * agreed / count)


def test_scores_of_known_distributions():
    """Sums by hand: two tokens, three entries."""
    ours = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    theirs = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]).log()
    scores = Scores()
    scores.add(torch.tensor([0, 0]), ours, theirs)
    figures = scores.summarize(has_reference=True)
    assert figures["perplexity"] == pytest.approx((0.5 * 0.1) ** -0.5)
    assert figures["kl_divergence"] == pytest.approx(0.25 * torch.tensor(2.0).log().item() / 2)
    assert (figures["accuracy"], figures["agreement"]) == (50, 50)


def test_what_is_wrong_is_told_before_weights_are_read(rows, monkeypatch):
    """Formats, adapters and prompts that do not fit; a disk that does not hold the reference."""
    monkeypatch.setattr("tandem.evaluation.records.ServedModel", None)
    with pytest.raises(ConfigError, match="int5"):
        evaluate_records(ModelConfig(path="demo"), str(rows), formats=["int8", "int5"])
    with pytest.raises(ConfigError, match="format without a name"):
        evaluate_records(ModelConfig(path="demo"), str(rows), formats=["int8", ""])
    long = rows.with_name("long.json")
    long.write_text(json.dumps([{"instruction": "a b " * 4000, "output": "x"}]))
    with pytest.raises(ConfigError, match=r"row 1 asks in .* leave it out"):
        evaluate_records(ModelConfig(path="demo"), str(long))


def test_a_full_disk_is_a_sentence(monkeypatch):
    """/dev/full takes no byte."""
    with open("/dev/full", "r+b", buffering=0) as full:
        monkeypatch.setattr("tempfile.TemporaryFile", lambda: full)
        with pytest.raises(CapacityError, match="--max-samples"):
            KeptLogprobs().append(torch.zeros(2, 3))
