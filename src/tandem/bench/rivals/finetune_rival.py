"""A process that trains an adapter: ours, or transformers and PEFT with one of transformers'
implementations of experts.

Arguments: kind (formats ``ours:EXPERTS+LINEAR``, or ``peft:IMPLEMENTATION``), folder of the
checkpoint, threads, tokens of a step. Each kind has a process of its own, so that its memory is its
own.
"""

import sys
import time
import warnings
from pathlib import Path

from rival_loop import answer_calls

RANK, SEED = 8, 11


def read_status(key: str) -> int:
    """Return the bytes that /proc/self/status gives for ``key``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) << 10


class Rival:
    def __init__(self) -> None:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        from tandem._native import ThreadPool
        from tandem.finetune.recipes.targets import find_targets, name_targets
        from tandem.finetune.training.loss import compute_loss, find_head
        from tandem.finetune.training.model import load_frozen

        kind, folder, threads, tokens = sys.argv[1:]
        warnings.simplefilter("ignore")
        torch.set_num_threads(int(threads))
        self.begin_bytes = read_status("VmRSS")
        side, _, variant = kind.partition(":")
        if side == "ours":
            pool = ThreadPool(int(threads))
            experts, _, linear = variant.partition("+")
            formats = {"expert_format": experts, "linear_format": linear}
            model = load_frozen(folder, is_bf16=True, pool=pool, **formats).model
        else:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16, experts_implementation=variant
            )
            model.requires_grad_(requires_grad=False)
            model.config.use_cache = False
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=RANK,
            lora_alpha=2 * RANK,
            target_modules=name_targets(model, find_targets(model, "all")),
        )
        torch.manual_seed(SEED)
        self.torch = torch
        head = None if side != "ours" else find_head(model)
        self.model = get_peft_model(model, config).train()
        self.take_loss = lambda inputs: self.model(**inputs).loss
        if head is not None:
            self.take_loss = lambda inputs: compute_loss(model, head, inputs)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3)
        self.losses: list[float] = []
        self.load_bytes = read_status("VmHWM")
        # Writing 5 to clear_refs resets VmHWM: from here on it is the peak memory of steps, without
        # loading.
        Path("/proc/self/clear_refs").write_text("5")
        self.batch = torch.randint(0, model.config.vocab_size, (1, int(tokens)))

    def step(self) -> list[float]:
        """Run a training step; return its seconds and its loss."""
        begin = time.perf_counter()
        with self.torch.autocast("cpu", self.torch.bfloat16):
            loss = self.take_loss({"input_ids": self.batch, "labels": self.batch})
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        return [time.perf_counter() - begin, self.losses[-1]]

    def first_loss(self) -> float:
        """Return the loss of the first step, running that step if none has run."""
        return self.losses[0] if self.losses else self.step()[1]

    def peak(self) -> list[int]:
        """Return the peak bytes of loading and of steps, without those that the imported libraries
        take.
        """
        return [self.load_bytes - self.begin_bytes, read_status("VmHWM") - self.begin_bytes]


answer_calls(Rival)
