"""The tutorial of the README from end to end; `make finetune-demo` runs this.

Makes a dataset from the standard library's docstrings, asks and measures the demo model, trains an
adapter, measures it with the adapter, serves both and asks them, and prints both scores beside each
other. Every step is a `tandem` command, which is shown. Exits with 1 if the adapter did not help.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tandem.cli.asking.local_server import connect

HERE = Path(__file__).resolve().parent
OUT = Path("build/finetune-demo")
RECIPE = HERE / "recipe.yaml"
MAX_TOKENS = 32
NUM_SHOWN = 3
ADAPTER_NAME = "docs"
"""Of the adapter, for those who ask the server."""
METRICS = ("perplexity", "bleu-1", "bleu-2", "bleu-3", "bleu-4", "rouge-1", "rouge-2", "rouge-l")
MUST_RISE = ("bleu-1", "bleu-4", "rouge-1", "rouge-l")


def main() -> int:
    """Run the tutorial in the current folder; all its files go below ``OUT``."""
    begin_s = time.monotonic()
    data, adapter = OUT / "data", OUT / "adapter"
    run([sys.executable, str(HERE / "make_dataset.py"), "--out", str(data)])
    measure = ["eval", "demo", "--data", "docstrings_held_out", "--dataset-dir", str(data)]
    measure += ["--max-tokens", str(MAX_TOKENS), "--json"]
    before = json.loads(tandem([*measure, "--predictions", str(OUT / "before.jsonl")]))
    recipe = os.path.relpath(RECIPE)
    words = [f"dataset_dir={data}", f"output_dir={adapter}"]
    print(tandem(["finetune", recipe, *words, "--dry-run"]))
    print(tandem(["finetune", recipe, *words]))
    with_adapter = ["--adapter", str(adapter)]
    after_file = ["--predictions", str(OUT / "after.jsonl")]
    after = json.loads(tandem([*measure, *with_adapter, *after_file]))
    show_answers(OUT / "before.jsonl", OUT / "after.jsonl")
    question = json.loads((data / "docstrings_held_out.json").read_text())[0]
    prompt = f"{question['instruction']}\n{question['input']}"
    ask_both(adapter, prompt)
    return report(before, after, adapter, time.monotonic() - begin_s)


def ask_both(adapter: Path, prompt: str) -> None:
    """Serve the model with its adapter; ask both by their names, on one server."""
    flags = ["--adapter", f"{ADAPTER_NAME}={adapter}"]
    print(f"$ tandem serve demo {' '.join(flags)}", flush=True)
    with connect("demo", None, None, flags) as (client, _):
        print(f"--- {prompt}")
        for model in ("demo", ADAPTER_NAME):
            message = {"role": "user", "content": prompt}
            body = {"model": model, "messages": [message], "max_tokens": MAX_TOKENS}
            answer = client.post("/v1/chat/completions", json=body | {"temperature": 0})
            answer.raise_for_status()
            text = answer.json()["choices"][0]["message"]["content"]
            print(f"{model + ':':<11} {' '.join(text.split())}")
    print()


def tandem(words: list[str]) -> str:
    """Run a command of Tandem; return what it writes."""
    return run([sys.executable, "-m", "tandem", *words])


def run(command: list[str]) -> str:
    """Show and run a command; a failed one ends the demo with its status."""
    name = "tandem" if command[1:3] == ["-m", "tandem"] else f"python {os.path.relpath(command[1])}"
    words = command[3:] if name == "tandem" else command[2:]
    shown = " ".join(json.dumps(word) if " " in word else word for word in words)
    print(f"$ {name} {shown}", flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(done.stdout, end="")
        sys.exit(done.returncode)
    return done.stdout


def show_answers(before: Path, after: Path) -> None:
    """Print some held-out questions with the answers of both models."""
    lines = [path.read_text("utf-8").splitlines()[:NUM_SHOWN] for path in (before, after)]
    for first, second in zip(*lines, strict=True):
        old, new = json.loads(first), json.loads(second)
        print(f"--- {old['prompt']}")
        print(f"before:     {' '.join(old['predict'].split())}")
        print(f"after:      {' '.join(new['predict'].split())}")
        print(f"docstring:  {old['label']}\n")


def report(before: dict, after: dict, adapter: Path, seconds: float) -> int:
    """Print the scores; return 1 if one that must rise did not."""
    print(f"{before['num_rows']} held-out rows {'before':>12}{'after':>12}")
    for name in METRICS:
        old, new = before["metrics"][name], after["metrics"][name]
        print(f"{name:<17} {old:>12.2f}{new:>12.2f}")
    print(f"\nthe loss curve: {adapter / 'training_loss.png'}")
    print(f"the whole demo took {seconds:.0f} s")
    worse = [name for name in MUST_RISE if after["metrics"][name] <= before["metrics"][name]]
    if worse:
        print(f"the adapter did not raise {', '.join(worse)}", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
