"""`tandem bench finetune`: a training step through packed experts against transformers and PEFT.

Layers of a known shape with random weights in bf16, written to a temporary checkpoint. A step is
forward, backward and AdamW on rank-8 adapters of the attention. Ours and each experts
implementation of transformers run in a process of their own and take turns; the fastest one is the
rival. The check is that the losses of the first step agree. Further cases compare memory: the peak
of each process during steps, less the memory of its libraries; and the peak while loading, with the
pages of the mapped checkpoint.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tandem._native import read_topology, recommend_threads
from tandem.bench.harness import BenchCase
from tandem.bench.rivals.processes import RivalProcess

__all__ = ["make_cases"]

IMPLEMENTATIONS = ("eager", "grouped_mm")
"""Implementations of transformers' routed experts that are timed as rivals. Its third one,
batched_mm, is left out: it copies the weights of each token's experts.
"""
FORMATS = {"bf16+none": 5e-3, "bf16+bf16": 5e-3, "int8+none": 1e-2, "int8+int8": 1e-2}
FORMATS |= {"int4+int8": 5e-2, "fp8+bf16": 1e-2}
"""Largest allowed relative difference of the first loss on random weights, by formats of the
experts and of the linear layers with the head.
"""
VOCABULARY = 32_000


@dataclass(frozen=True)
class Shape:
    """Sizes of a model: hidden size, expert size, experts, experts per token, layers."""

    name: str
    hidden: int
    inner: int
    num_experts: int
    top_k: int
    num_layers: int
    tokens: int


FULL = Shape("qwen3-30b-a3b", 2048, 768, 128, 8, 2, 512)
LATENT = Shape("deepseek-v2-lite", 2048, 1408, 64, 6, 2, 512)
QUICK = Shape("toy", 256, 128, 8, 2, 1, 64)


def make_cases(*, quick: bool = False) -> Iterator[BenchCase]:
    """Yield the cases of each format: tokens/s of a training step, and peak memory."""
    for shape in (QUICK,) if quick else (FULL, LATENT):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            _write_checkpoint(shape, Path(folder))
            yield from _make_shape_cases(shape, folder, stack)


def _make_shape_cases(shape: Shape, folder: str, stack: ExitStack) -> Iterator[BenchCase]:
    threads = recommend_threads(read_topology()).threads

    def start(kind: str) -> RivalProcess:
        arguments = (kind, folder, str(threads), str(shape.tokens))
        settings = {"OMP_WAIT_POLICY": "PASSIVE"}
        return RivalProcess(
            Path(sys.executable), "finetune_rival.py", *arguments, settings=settings
        )

    rivals = {
        f"peft {name}": stack.enter_context(start(f"peft:{name}")) for name in IMPLEMENTATIONS
    }
    for name, bound in FORMATS.items():
        with start(f"ours:{name}") as ours:
            yield from _make_format_cases(shape, name, bound, ours, rivals)


def _make_format_cases(
    shape: Shape, name: str, bound: float, ours: RivalProcess, rivals: dict[str, RivalProcess]
) -> Iterator[BenchCase]:
    label = f"shape={shape.name} layers={shape.num_layers} format={name} tokens={shape.tokens}"

    def step(peer: RivalProcess) -> float:
        seconds, _ = peer.call("step")
        return shape.tokens / seconds

    def check() -> str:
        # All sides begin with the same adapters, which have no effect before the first update, so
        # the first losses must be equal.
        loss = ours.call("step")[1]
        wanted = next(iter(rivals.values())).call("first_loss")
        off = abs(loss / wanted - 1)
        return "ok" if off <= bound else f"loss {loss}, peft's {wanted}: {off:.1e} off"

    yield BenchCase(
        name=label,
        unit="tok/s",
        ours=lambda: step(ours),
        rivals={key: lambda peer=peer: step(peer) for key, peer in rivals.items()},
        check=check,
        higher_is_better=True,
    )
    for which, what in enumerate(("load memory", "step memory")):
        yield BenchCase(
            name=f"{label} {what}",
            unit="GB",
            ours=lambda at=which: ours.call("peak")[at] / 1e9,
            rivals={
                key: lambda peer=peer, at=which: peer.call("peak")[at] / 1e9
                for key, peer in rivals.items()
            },
            check=lambda: "ok",
        )


def _write_checkpoint(shape: Shape, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, DeepseekV2Config, Qwen3MoeConfig

    kind: Any = DeepseekV2Config if shape is LATENT else Qwen3MoeConfig
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "moe_intermediate_size": shape.inner,
        "num_experts_per_tok": shape.top_k,
        "num_hidden_layers": shape.num_layers,
        "max_position_embeddings": 4096,
        "eos_token_id": 0,
    }
    if shape is LATENT:
        config = kind(
            **common,
            n_routed_experts=shape.num_experts,
            n_shared_experts=2,
            first_k_dense_replace=0,
            num_attention_heads=16,
            num_key_value_heads=16,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            head_dim=64,
            topk_method="greedy",
        )
    else:
        config = kind(
            **common,
            num_experts=shape.num_experts,
            num_attention_heads=max(shape.hidden // 64, 1),
            num_key_value_heads=4,
            head_dim=128 if shape.hidden > 1024 else 64,
            norm_topk_prob=True,
        )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
