"""Train the demo model from nothing: `python examples/demo_model/train.py --out DIR`.

Owns the order of the recipe: corpus, tokenizer, token stream, training, export, evaluation. The
number of steps is fixed and every choice is seeded. The whole stream is laid out before the first
step, and step s reads its s-th slice, so a run that was killed continues as if it had not been.
"""

import argparse
import ctypes
import json
import logging
import math
import os
import platform
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from corpus import SourceFile, hash_corpus, read_corpus
from evaluate import evaluate
from export import export_model
from model import DemoModel
from optimizer import MuonAdamW
from recipe import FULL, MANY_EXPERTS, TOY, Recipe
from stream import Batches, build_stream
from tokenizer import save_tokenizer, train_tokenizer
from tokenizers import Tokenizer

NUM_WORKERS = 2
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # From glibc's malloc.h.

log = logging.getLogger("demo_model")


def schedule(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine down to zero."""
    if step < recipe.num_warmup_steps:
        return (step + 1) / recipe.num_warmup_steps
    done = (step - recipe.num_warmup_steps) / (recipe.num_steps - recipe.num_warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * done))


def train(stream: np.ndarray, recipe: Recipe, out: Path, stop_at: int) -> tuple[DemoModel, dict]:
    """Run the remaining steps in `NUM_WORKERS` processes; return the model and its record."""
    np.save(out / "stream.npy", stream)
    torch.multiprocessing.spawn(work, args=(recipe, out, stop_at), nprocs=NUM_WORKERS)
    saved = torch.load(out / "checkpoint.pt", weights_only=True)
    model = DemoModel(recipe.shape)
    model.load_state_dict(saved["model"])
    return model, saved["record"]


def work(rank: int, recipe: Recipe, out: Path, stop_at: int) -> None:
    """One worker: its rows of every batch, on one thread. All workers hold the same weights.

    Processes meet once or twice a step, where threads would meet at every operator; that is faster
    alone, and on a busy machine it is the difference between slow and stuck.
    """
    configure(rank)
    store = dist.FileStore(str(out / f"rendezvous-{os.getppid()}"), NUM_WORKERS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_WORKERS)
    torch.manual_seed(recipe.seed)
    model = DemoModel(recipe.shape)
    optimizer = MuonAdamW(model, recipe.muon_lr, recipe.adam_lr, recipe.weight_decay)
    batches = Batches(np.load(out / "stream.npy", mmap_mode="r"), recipe)
    record: dict = {"cpu_s": 0.0, "wall_s": 0.0, "losses": []}
    path, first = out / "checkpoint.pt", 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        record, first = saved["record"], saved["step"]
        log.info("resumed step=%d", first)
    start_wall, start_cpu = time.monotonic(), time.process_time()
    base_wall, base_cpu = record["wall_s"], record["cpu_s"]
    recent: list[torch.Tensor] = []
    for step in range(first, stop_at):
        inputs, targets = (t.chunk(NUM_WORKERS)[rank] for t in batches.read(step))
        loss, balance = model.compute_loss(inputs, targets)
        (loss + recipe.balance_weight * balance).backward()
        average_gradients(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step(schedule(step, recipe))
        model.zero_grad(set_to_none=True)
        recent.append(loss.detach())
        done = step + 1
        is_last = done == stop_at
        if done % recipe.steps_per_log == 0 or is_last:
            sums = torch.stack([torch.stack(recent).mean(), torch.tensor(time.process_time())])
            sums[1] -= start_cpu
            dist.all_reduce(sums)
            mean, recent = sums[0].item() / NUM_WORKERS, []
            record["cpu_s"] = base_cpu + sums[1].item()
            record["wall_s"] = base_wall + time.monotonic() - start_wall
            record["num_steps"] = done
            record["losses"].append([done, round(mean, 4)])
            log.info(
                "step=%d loss=%.3f balance=%.3f grad_norm=%.2f cpu_s=%.0f wall_s=%.0f",
                *(done, mean, balance.item(), norm.item(), record["cpu_s"], record["wall_s"]),
            )
        if rank == 0 and (done % recipe.steps_per_checkpoint == 0 or is_last):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "record": record, "step": done}, path.with_suffix(".part"))
            os.replace(path.with_suffix(".part"), path)
    dist.barrier()
    dist.destroy_process_group()


def average_gradients(model: DemoModel) -> None:
    """Replace every gradient by its mean over the workers."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def configure(rank: int) -> None:
    """Set up a process: one thread for a worker; only the first worker speaks."""
    level = logging.INFO if rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(message)s", stream=sys.stdout)
    torch.set_num_threads(1)
    keep_freed_memory()


def prepare(recipe: Recipe, out: Path) -> tuple[list[SourceFile], Tokenizer]:
    """Read the corpus and fit the tokenizer, or load the one that a killed run has fitted."""
    files = read_corpus(recipe.max_file_bytes)
    if recipe.num_files is not None:
        held_out = [file for file in files if file.is_held_out][:2]
        files = [file for file in files if not file.is_held_out][: recipe.num_files] + held_out
    folder = out / "model"
    if (folder / "tokenizer.json").exists():
        return files, Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = (file.text for file in files if not file.is_held_out)
    tokenizer = train_tokenizer(texts, recipe.shape.vocab_size)
    save_tokenizer(tokenizer, folder, recipe.shape.context_len)
    return files, tokenizer


def keep_freed_memory() -> None:
    """Tell glibc to reuse large blocks, not to return them: page faults cost a fifth of a step."""
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
            libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def main() -> None:
    """Parse the command line and run the recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for model and checkpoint")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--toy", action="store_true", help="the whole recipe at toy size")
    sizes.add_argument(
        "--many-experts", action="store_true", help="8 of 32 experts a token, in half an hour"
    )
    parser.add_argument("--stop-at", type=int, help="export and measure after this step")
    arguments = parser.parse_args()
    configure(0)
    recipe = TOY if arguments.toy else MANY_EXPERTS if arguments.many_experts else FULL
    run(recipe, arguments.out, recipe.num_steps if arguments.stop_at is None else arguments.stop_at)


def run(recipe: Recipe, out: Path, stop_at: int) -> None:
    """From the corpus to `out / "model"`, metrics included."""
    out.mkdir(parents=True, exist_ok=True)
    files, tokenizer = prepare(recipe, out)
    seen = [file for file in files if not file.is_held_out]
    log.info("files=%d bytes=%d", len(seen), sum(len(file.text) for file in seen))
    stream = build_stream(seen, tokenizer, recipe)
    model, record = train(stream, recipe, out, stop_at)
    export_model(model, tokenizer, out / "model")
    torch.set_num_threads(NUM_WORKERS)
    metrics = {
        "recipe": asdict(recipe),
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "num_training_tokens": record["num_steps"] * recipe.tokens_per_step,
        "corpus": describe_corpus(files),
        "training": {**record, "num_workers": NUM_WORKERS, "threads_per_worker": 1},
        **evaluate(model, files, tokenizer, recipe, out / "model"),
        "other_cpu_s": time.process_time(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "tokenizers", "numpy")},
        },
    }
    log.info("losses=%s", json.dumps(metrics["losses"]))
    (out / "model" / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")


def describe_corpus(files: list[SourceFile]) -> dict:
    """What was read: enough to tell whether two runs saw the same text."""
    return {
        "python": platform.python_version(),
        "sha256": hash_corpus(files),
        "num_files": len(files),
        "num_held_out_files": sum(file.is_held_out for file in files),
        "num_characters": sum(len(file.text) for file in files),
    }


if __name__ == "__main__":
    main()
