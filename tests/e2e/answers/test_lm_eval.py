"""lm-eval gets of our completions API what its own model of transformers gets of the same weights.

Goal: the same choices and the same text, log-probabilities within 1e-4. Method: task files made
here, of each kind that lm-eval has, run whole by both.
"""

import json
import warnings

import pytest
import yaml

from tandem.models.loading.hub import resolve_folder

TOLERANCE = 1e-4
"""Of a continuation's sum, or of a text's divided by its tokens; both sides are float32."""
ROWS = [
    {"question": "def add(a, b):\n    return", "choices": [" a + b", " a - b", " None"], "gold": 0},
    {"question": "import os\n\n\ndef", "choices": [" main():", " return", " 世界"], "gold": 0},
    {"question": "for i in", "choices": [" range(10):", " while", " x"], "gold": 0},
    {"question": "class Reader:\n    def", "choices": [" __init__(self):", " 3", "\n"], "gold": 0},
]
TEXTS = ["def add(a, b):\n    return a + b\n", "import os\nimport sys\n\nprint(os.getcwd())\n"]
TASKS = {
    "choices_here": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling_here": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
    },
    "text_here": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ["\n\n"], "do_sample": False, "max_gen_toks": 24},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def server(serve_demo_module):
    with serve_demo_module(
        "--model.expert-format", "none", "--model.linear-format", "none", "--model.dtype", "float32"
    ) as live:
        yield live


@pytest.fixture
def tasks(tmp_path):
    """Write the task files; returns their folder."""
    for name, task in TASKS.items():
        rows = [{"text": text} for text in TEXTS] if name == "rolling_here" else ROWS
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        written = task | {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
        }
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(written))
    return tmp_path


@pytest.mark.slow
def test_all_kinds_of_tasks(server, tasks, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Its own and those of what it imports.
        pytest.importorskip("lm_eval", reason="needs lm-eval[api]")
        pytest.importorskip("tenacity", reason="needs lm-eval[api]")
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.models.openai_completions import LocalCompletionsAPI
        from lm_eval.tasks import TaskManager

        folder = str(resolve_folder("demo"))
        models = {
            "api": LocalCompletionsAPI(
                base_url=f"{server.url}/v1/completions",
                model="demo",
                tokenizer=folder,
                tokenizer_backend="huggingface",
                batch_size=2,
            ),
            "hf": HFLM(pretrained=folder, dtype="float32", device="cpu", batch_size=1),
        }
        found = {}
        for name, model in models.items():
            found[name] = simple_evaluate(
                model=model,
                tasks=[*TASKS],
                task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
                log_samples=True,
                bootstrap_iters=0,
            )
    samples = {name: results["samples"] for name, results in found.items()}
    for task in TASKS:
        assert len(samples["api"][task]) == len(samples["hf"][task]) > 0
        for ours, theirs in zip(samples["api"][task], samples["hf"][task], strict=True):
            if task == "text_here":
                assert ours["resps"] == theirs["resps"]
                continue
            for [our], [their] in zip(ours["resps"], theirs["resps"], strict=True):
                if task == "rolling_here":
                    num_tokens = len(models["hf"].tok_encode(ours["target"]))
                    assert float(our) == pytest.approx(float(their), abs=TOLERANCE * num_tokens)
                else:
                    assert float(our[0]) == pytest.approx(float(their[0]), abs=TOLERANCE)
                    assert str(our[1]) == str(their[1]), "greedy"
    for metric in ("acc,none", "acc_norm,none"):
        ours, theirs = (found[name]["results"]["choices_here"][metric] for name in models)
        assert ours == theirs
