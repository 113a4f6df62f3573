"""The recipe: every number of a run, at full and at toy size."""

from dataclasses import dataclass

from model import Shape


@dataclass(frozen=True)
class Recipe:
    """All numbers of a run."""

    shape: Shape
    seed: int = 20240229
    num_steps: int = 1000
    tokens_per_step: int = 8192
    num_long_steps: int = 200
    short_len: int = 512
    num_warmup_steps: int = 40
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    weight_decay: float = 0.05
    balance_weight: float = 0.01
    max_grad_norm: float = 1.0
    chat_share: float = 0.08
    num_files: int | None = None
    max_file_bytes: int = 300_000
    steps_per_checkpoint: int = 50
    steps_per_log: int = 10


FULL = Recipe(Shape())
MANY_EXPERTS = Recipe(
    Shape(
        vocab_size=2048,
        hidden_size=192,
        num_heads=3,
        num_kv_heads=1,
        num_experts=32,
        top_k=8,
        expert_size=48,
        context_len=512,
    ),
    num_steps=400,
    num_long_steps=80,
    short_len=256,
    steps_per_checkpoint=10,
)
"""As many choices as large models make: what deferred experts do is measured on it."""
TOY = Recipe(
    Shape(vocab_size=512, hidden_size=64, num_layers=2, expert_size=32, context_len=256),
    num_steps=30,
    tokens_per_step=1024,
    num_long_steps=10,
    short_len=128,
    num_warmup_steps=5,
    num_files=40,
    max_file_bytes=20_000,
    steps_per_checkpoint=10,
)
