"""Stage dpo: rows of two answers, and training on them against plain trl and PEFT."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.core.errors import ConfigError, UnsupportedError
from tandem.finetune.data.dataset import prepare_data
from tandem.finetune.data.records import load_pairs
from tandem.finetune.forecast.prediction import predict_run
from tandem.finetune.recipes.recipe import make_recipe
from tandem.finetune.recipes.targets import find_targets, name_targets
from tandem.finetune.training.trainer import finetune

if find_spec("trl") is None:  # Its import takes a second in each process that collects this.
    pytest.skip("stage dpo needs the `dpo` extra", allow_module_level=True)

LEAST = {"model_name_or_path": "demo", "output_dir": "out", "stage": "dpo"}
BOUND = 1e-4
"""Largest relative difference of a step's loss in float32."""
PAIRS = [
    {
        "instruction": f"What is the {word}?",
        "input": "",
        "chosen": f"The {word} is {word[::-1]}.",
        "rejected": f"No idea what {word} means, ask me later.",
    }
    for word in ("name", "color", "size", "owner", "date", "price", "place", "shape")
]


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    """The flat keys of a short run over eight pairs."""
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "pairs.json").write_text(json.dumps(PAIRS))
    info = {"file_name": "pairs.json", "ranking": True}
    info["columns"] = {"prompt": "instruction", "query": "input"}
    info["columns"] |= {"chosen": "chosen", "rejected": "rejected"}
    (folder / "dataset_info.json").write_text(json.dumps({"pairs": info}))
    return {
        **LEAST,
        "dataset": "pairs",
        "dataset_dir": str(folder),
        "lora_rank": 4,
        "per_device_train_batch_size": 2,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 2,
        "cutoff_len": 64,
        "cpu_infer": 2,
        "plot_loss": True,
    }


@pytest.fixture(scope="module")
def run(values, tmp_path_factory):
    """A whole run through int8 experts and packed linear layers: (keys, folder, report)."""
    folder = tmp_path_factory.mktemp("run") / "out"
    keys = {"expert_format": "int8", "linear_format": "int8", "val_size": 2}
    made = {**values, **keys, "num_train_epochs": 2, "output_dir": str(folder)}
    return made, folder, finetune(make_recipe(made))


def read_log(folder):
    return [json.loads(line) for line in (folder / "trainer_log.jsonl").read_text().splitlines()]


def test_a_run_learns_and_leaves_its_artefacts(run):
    """Rewards are logged, the chosen answers win, and the adapter is alone in its folder."""
    _, folder, report = run
    lines = [line for line in read_log(folder) if "loss" in line]
    assert len(lines) == 6
    assert lines[0]["loss"] == pytest.approx(0.6931, abs=1e-3)  # ln 2: it is the reference still.
    assert lines[-1]["loss"] < 0.3
    assert lines[-1]["rewards/accuracies"] == lines[-1]["accuracy"] == 1
    assert lines[-1]["rewards/margins"] > lines[1]["rewards/margins"]
    assert report.results["eval_rewards/accuracies"] == 1
    assert report.num_examples == 6
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_model.safetensors", "training_rewards_accuracies.png"} <= names
    assert {"checkpoint-2", "checkpoint-4", "checkpoint-6"} <= names
    assert "ref" not in names
    assert not [p for p in folder.rglob("*") if p.suffix in (".bin", ".pt", ".pth", ".pkl")]
    assert "- dpo\n" in (folder / "README.md").read_text()


@pytest.mark.slow
def test_a_resumed_run_is_the_same_bit_by_bit(run, tmp_path):
    """From the middle checkpoint; the reference is the base still.

    `make test` resumes a run of the other stage, in test_run.py: both stages have its trainer.
    """
    values, folder, _ = run
    again = tmp_path / "again"
    again.mkdir()
    shutil.copytree(folder / "checkpoint-2", again / "checkpoint-2")
    changed = {**values, "output_dir": str(again), "resume_from_checkpoint": True}
    finetune(make_recipe(changed))
    first, second = (load_file(f / "adapter_model.safetensors") for f in (folder, again))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_adapter_is_compared_with_the_base(run, values, tmp_path):
    """One that goes on training has its rewards from the first step."""
    changed = {"adapter_name_or_path": str(run[1]), "output_dir": str(tmp_path / "out")}
    finetune(make_recipe({**values, **changed, "max_steps": 1}))
    first = read_log(tmp_path / "out")[0]
    assert first["loss"] < 0.5
    assert first["rewards/margins"] > 0.5


def take_plain_losses(folder, batch_size, **options) -> list[float]:
    """The loss of each step by transformers, PEFT and trl alone, from the same text."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    from tandem.finetune.training.epochs import EpochSampler
    from tandem.models.loading.hub import DEMO_FOLDER

    set_seed(42)
    model = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32)
    model.requires_grad_(requires_grad=False)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=8,
        target_modules=name_targets(model, find_targets(model, "all")),
    )
    # trl ends answers with this token; the template does so with this one.
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER, eos_token="<|im_end|>")
    rows = [
        {
            "prompt": tokenizer.apply_chat_template(
                [{"role": "user", "content": row["instruction"]}],
                tokenize=False,
                add_generation_prompt=True,
            ),
            "chosen": row["chosen"],
            "rejected": row["rejected"],
        }
        for row in PAIRS
    ]
    order = [i for batch in EpochSampler(len(rows), batch_size, 42) for i in batch]
    arguments = DPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=batch_size,
        num_train_epochs=1,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        gradient_checkpointing=False,
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
        disable_tqdm=True,
        use_cpu=True,
        router_aux_loss_coef=0.0,
        **options,
    )
    trainer = DPOTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list([rows[i] for i in order]),
        processing_class=tokenizer,
        peft_config=config,
    )
    set_seed(42)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Names that transformers will change.
@pytest.mark.parametrize(
    ("keys", "options"),
    [
        # The third goes the way of both.
        pytest.param({}, {}, marks=pytest.mark.slow),
        pytest.param(
            {"pref_loss": "ipo", "pref_beta": 0.3},
            {"loss_type": "ipo", "beta": 0.3},
            marks=pytest.mark.slow,
        ),
        # trl's mean over tokens is the mean of the answers' where a batch has one.
        (
            {"pref_loss": "hinge", "pref_ftx": 0.5, "per_device_train_batch_size": 1},
            {"loss_type": ["hinge", "sft"], "loss_weights": [1.0, 0.5]},
        ),
    ],
)
def test_losses_are_those_of_plain_trl(keys, options, values, tmp_path):
    """Each step's loss in float32, and that the steps change it by far more than the bound."""
    changed = {"expert_format": "none", "output_dir": str(tmp_path / "ours"), **keys}
    finetune(make_recipe({**values, **changed}))
    ours = [line["loss"] for line in read_log(tmp_path / "ours") if "loss" in line]
    batch_size = keys.get("per_device_train_batch_size", 2)
    plain = take_plain_losses(tmp_path / "plain", batch_size, **options)
    assert len(ours) == len(plain) == 8 // batch_size
    assert ours == pytest.approx(plain, rel=BOUND)
    assert abs(plain[-1] / plain[0] - 1) > 0.1


def test_answers_weigh_alike_however_a_batch_is_split(values, tmp_path):
    """The first step's loss of four pairs at once, and of twice two: answers of many lengths."""
    rows = [{**row, "chosen": row["chosen"] * (1 + 2 * i)} for i, row in enumerate(PAIRS[:4])]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    info = json.loads((Path(values["dataset_dir"]) / "dataset_info.json").read_text())
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    keys = {**values, "dataset_dir": str(tmp_path), "cutoff_len": 128, "plot_loss": False}
    keys |= {"expert_format": "none", "pref_ftx": 2.0}
    found = []
    for size in (4, 2, 1):
        keys |= {"per_device_train_batch_size": size, "gradient_accumulation_steps": 4 // size}
        finetune(make_recipe({**keys, "output_dir": str(tmp_path / str(size))}))
        (line,) = read_log(tmp_path / str(size))
        found.append(line["loss"])
    assert found == pytest.approx([found[0]] * 3, rel=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_label_smoothing(tmp_path):
    """A sum of two of trl's losses is the one that LLaMA-Factory means, at any margin."""
    from tandem.finetune.recipes.recipe import PreferenceKeys
    from tandem.finetune.training.preferences import make_pair_arguments

    keys = PreferenceKeys(dpo_label_smoothing=0.2)
    made = make_pair_arguments(keys, output_dir=str(tmp_path), use_cpu=True, bf16=False)
    assert made.loss_type == ["sigmoid", "robust"]
    margin = torch.tensor([-3.0, 0.0, 0.7], dtype=torch.float64)
    win, lose = (-torch.nn.functional.logsigmoid(sign * margin) for sign in (1, -1))
    robust = (0.8 * win - 0.2 * lose) / 0.6  # As trl's page has it.
    assert made.loss_weights is not None
    mixed = made.loss_weights[0] * win + made.loss_weights[1] * robust
    torch.testing.assert_close(mixed, 0.8 * win + 0.2 * lose)


def test_bad_pairs_are_counted_with_their_lines(tmp_path):
    """One answer, the same twice, no text: left out, and told where."""
    good = {"instruction": "q", "chosen": "a", "rejected": "b"}
    rows = [good, {"instruction": "q", "chosen": "a"}, {**good, "rejected": "a "}]
    rows += [{**good, "chosen": 3}, {**good, "rejected": ""}, good]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    records = load_pairs(str(tmp_path / "rows.jsonl"), tmp_path)
    assert len(records.pairs) == 2
    assert [(row.line, row.why) for row in records.bad_rows] == [
        (2, "no 'rejected'"),
        (3, "chosen and rejected are equal"),
        (4, "'chosen' is a int, not text"),
        (5, "turn 2 is empty"),
    ]


def test_sharegpt_pairs(tmp_path):
    """Turns up to a question, and one turn each."""
    turns = [("human", "q"), ("gpt", "a"), ("human", "r")]
    row = {
        "conversations": [{"from": name, "value": text} for name, text in turns],
        "chosen": {"from": "gpt", "value": "good"},
        "rejected": {"from": "gpt", "value": "bad"},
    }
    rows = [row, {**row, "rejected": "bad"}, {**row, "conversations": row["conversations"][:2]}]
    (tmp_path / "rows.json").write_text("[" + ",\n".join(map(json.dumps, rows)) + "]")
    info = {"file_name": "rows.json", "formatting": "sharegpt", "ranking": True}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"rows": info}))
    records = load_pairs("rows", tmp_path)
    (pair,) = records.pairs
    assert [m.content for m in pair.chosen.messages] == ["q", "a", "r", "good"]
    assert [m.content for m in pair.rejected.messages] == ["q", "a", "r", "bad"]
    assert [(row.line, row.why) for row in records.bad_rows] == [
        (2, "'rejected' is no turn"),
        (3, "3 turns: questions and answers do not pair"),
    ]
    info["ranking"] = False
    (tmp_path / "dataset_info.json").write_text(json.dumps({"rows": info}))
    with pytest.raises(UnsupportedError, match="ranking: true"):
        load_pairs("rows", tmp_path)


def test_answers_are_learned_and_prompts_are_not(values):
    """Both answers follow one prompt; what the cutoff makes equal is left out."""
    from tandem.finetune.data.templates import load_tokenizer
    from tandem.models.families import open_checkpoint

    tokenizer = load_tokenizer(open_checkpoint("demo"))
    data = prepare_data(make_recipe(values), tokenizer)
    first = data.train[0]
    assert tokenizer.decode(first.chosen_ids).startswith(PAIRS[0]["chosen"])
    assert tokenizer.decode(first.rejected_ids).startswith(PAIRS[0]["rejected"])
    assert PAIRS[0]["instruction"] in tokenizer.decode(first.prompt_ids)
    short = make_recipe({**values, "cutoff_len": 2})
    with pytest.raises(ConfigError, match="cutoff_len"):
        prepare_data(short, tokenizer)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"pref_loss": "orpo"}, UnsupportedError, "'orpo' is not built: use sigmoid, hinge, ipo"),
        ({"pref_loss": "sigmod"}, UnsupportedError, "use sigmoid"),
        ({"pref_beta": 0}, ConfigError, "pref_beta"),
        ({"dpo_label_smoothing": 0.5}, ConfigError, "dpo_label_smoothing"),
        ({"dpo_label_smoothing": 0.1, "pref_loss": "ipo"}, ConfigError, "use sigmoid"),
        ({"ref_model": "other"}, UnsupportedError, "without its adapter"),
        ({"simpo_gamma": 0.5}, UnsupportedError, "SimPO"),
        ({"packing": True}, ConfigError, "packing"),
        ({"train_on_prompt": True}, ConfigError, "train_on_prompt"),
        ({"stage": "kto"}, UnsupportedError, "use sft, dpo or pt"),
    ],
)
def test_wrong_keys_are_named(changes, kind, message):
    """What trl would do otherwise than LLaMA-Factory, or not at all, is refused."""
    with pytest.raises(kind, match=message):
        make_recipe({**LEAST, **changes})


def test_without_trl_the_recipe_is_refused(values, tmp_path, monkeypatch):
    """With the command that installs it, before the model is loaded."""
    monkeypatch.setattr("tandem.finetune.training.trainer.find_spec", lambda name: None)
    recipe = make_recipe({**values, "output_dir": str(tmp_path)})
    with pytest.raises(UnsupportedError, match=r"pip install 'tandem-llm\[dpo\]'"):
        finetune(recipe)


def test_a_prediction_counts_both_answers(values):
    """A row is two sequences, and the reference computes but keeps nothing."""
    recipe = make_recipe(values)
    predicted = predict_run(recipe)
    activations = next(part for part in predicted.parts if part.name == "activations")
    assert "4 chosen and rejected answers" in activations.why
    assert predicted.num_steps == 4
    assert predicted.data.num_rows == 8
    assert predicted.data.num_tokens > 8 * predicted.data.longest
    assert not predicted.problems


@pytest.mark.slow
def test_adapters_of_routed_experts(values, tmp_path):
    """They are switched off for the reference as well, and are trained."""
    keys = {"expert_format": "int8", "lora_target": "all,experts", "max_steps": 3}
    finetune(make_recipe({**values, **keys, "output_dir": str(tmp_path / "out")}))
    losses = [line["loss"] for line in read_log(tmp_path / "out") if "loss" in line]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] < 0.6
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    experts = [value for name, value in saved.items() if ".experts." in name and "lora_B" in name]
    assert experts
    assert all(value.any() for value in experts)


def test_the_example(monkeypatch):
    """Its rows are all good, and its keys are obeyed."""
    from tandem.finetune.data.templates import load_tokenizer
    from tandem.finetune.recipes.recipe import read_recipe
    from tandem.models.families import open_checkpoint

    monkeypatch.chdir(Path(__file__).parents[2])
    recipe = read_recipe("examples/preferences/recipe.yaml")
    data = prepare_data(recipe, load_tokenizer(open_checkpoint("demo")))
    assert (len(data.train), data.bad_rows, data.num_unlearnable) == (8, [], 0)
