"""`tandem bench model`: some layers of large MoE models with experts in each weight format.

The shapes are Qwen3-30B-A3B's with six of its 48 layers; in cases named ``mla`` DeepSeek-V2-Lite's
with four of its 27; in cases named ``hybrid`` Qwen3.6-35B-A3B's with six of its 40, five of them
with a recurrent state; in cases named ``glm`` GLM-4.7-Flash's with six of its 47; in cases named
``gemma4`` Gemma 4 26B-A4B's with six of its 30. All have a vocabulary of 32,000 and random weights,
so that they exceed the caches and still fit into a laptop. Ours runs whole engine steps. The rival
is transformers in bfloat16 with grouped experts or, ``--with-peers``, llama.cpp and its fork
ik_llama.cpp in the format nearest to ours, from the same weights. Before a time counts, the logits
of ours and of the peer must be near transformers', within the error of the format. Qwen3.6's and
Gemma's experts leave no memory for a third model: with peers their logits are compared with the
peer's alone, and so are GLM's. The prefill of ``hybrid`` also reports the share of convolution,
gates, recurrence and gated norm; another case of it measures a message after a long history. Cases
named ``gguf`` run one file of a GGUF type in all three engines (``stored``).

The ceiling of a decode step is reading once the packed bytes of the distinct experts that its
tokens choose and of all other weights, at the rate at which a bank of experts is read. A prefill
has no ceiling here: `tandem bench moe` and `linear` bound its operators.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

from tandem import _native
from tandem.bench.harness import BenchCase, time_call
from tandem.bench.rivals.llama_rivals import PEERS, LlamaCpp
from tandem.bench.serving.driver import (
    EngineDriver,
    Phase,
    TransformersDriver,
    score_reference,
)
from tandem.bench.serving.family_sizes import (
    GEMMA4_SHAPE,
    GLM_FLASH_SHAPE,
    QUICK_GEMMA4_SHAPE,
    QUICK_GLM_FLASH_SHAPE,
)
from tandem.bench.serving.stored import SHAPE, make_stored_cases
from tandem.core.errors import CapacityError
from tandem.core.spec import ModelSpec
from tandem.models.families import find_family
from tandem.models.loading.skeleton import build_skeleton
from tandem.models.planning.planner import describe_model, plan_model

__all__ = [
    "LATENT_SHAPE",
    "QUICK_SHAPE",
    "SHAPE",
    "make_cases",
    "write_random_model",
    "write_random_weights",
]

LINEAR_FORMATS = {
    "qwen3_moe": {"int8g128": "int8g128", "int4g32": "int8g128", "bf16": "bf16"},
    "deepseek_v2": {"int8g128": "int8g64", "int4g32sym": "int4g32sym", "bf16": "bf16"},
    "qwen3_5_moe_text": {"int8g128": "int8g128"},
    "glm4_moe_lite": {"int8g128": "int8g128", "int4g32sym": "int4g32sym"},
    "gemma4_text": {"int8g64": "int8g64", "int4g32sym": "int4g32sym"},
}
"""For each model: the weight formats of routed experts that are measured, with the format that all
other matrices have then. The dense layer of V2-Lite has 10,944 columns and Gemma 4's experts have
704, which are not multiples of 128. Most weights of a V2-Lite step are not routed experts: all of
them have four bits and one scale per group, as in the peers' files, and so have those of the last
two models.
"""
HEAD_RULES = """\
- match: {name: "^lm_head$"}
  replace: {class: LmHead, kwargs: {format: int8g128}}
"""
"""Placement rule that stores the LM head in eight bits, as the peers' model files do."""
LARGEST_ERROR = {
    **dict.fromkeys(("int8g128", "int8g64"), 0.08),
    "int4g32": 0.35,
    "int4g32sym": 0.5,
    "bf16": 0.06,
}
"""Largest allowed norm of the error of a token's logits against the rival's, relative to their
norm. It covers the format's error in one layer (0.021, 0.145, 0.005), added as random errors are
over six layers, and the rounding of bfloat16 on both sides: 0.03 was measured between two correct
models.
"""
LARGEST_ALONE_ERROR = {"int8g128": 0.35, "int8g64": 0.35, "int4g32": 0.8, "int4g32sym": 0.8}
"""Largest allowed error of ours and of a peer against transformers, for models that are compared
one at a time: six layers choose 8 of 128 or 256 experts by scores that are close together.
"""
ERROR_FACTORS = {"qwen3_5_moe_text": 1.5, "glm4_moe_lite": 4.0}
"""Factors by which the error of these models may be larger, up to ``FOUR_BITS_ERROR``. A recurrent
state carries the errors of all earlier tokens: 0.080 was measured in two small layers, against
float32 as well as bfloat16. The four experts per token of GLM-4.7-Flash have nearly equal weights,
so that one different choice in bfloat16 changes a quarter of the sum: llama.cpp in q8_0 is off by
0.23.
"""
FOUR_BITS_ERROR = 0.8
PEER_LARGEST_ERROR = {
    **dict.fromkeys(("int8g128", "int8g64"), 0.1),
    **dict.fromkeys(("int4g32", "int4g32sym"), 0.6),
}
"""Largest allowed error of llama.cpp's logits, by our format. Its q4_0 has no minimum and is used
in attention too; its fork was off by 0.080 in q8_0, with AVX-512.
"""
NEEDED_BYTES = {
    "qwen3_moe": 17 << 30,
    "deepseek_v2": 9 << 30,
    "qwen3_5_moe_text": 17 << 30,
    "glm4_moe_lite": 17 << 30,
    "gemma4_text": 17 << 30,
}
"""Memory needed, in bytes: for two models in bfloat16 of 7 and 4 GB with our packed copies; the
third and the last take 10 GB each when packed.
"""
WORDS = {
    "qwen3_moe": "",
    "deepseek_v2": "mla ",
    "qwen3_5_moe_text": "hybrid ",
    "glm4_moe_lite": "glm ",
    "gemma4_text": "gemma4 ",
}
"""First words in the names of a model's cases."""
HEAD_NORMS = (".self_attn.q_norm.weight", ".self_attn.k_norm.weight")
APART = ("qwen3_5_moe_text", "gemma4_text", "glm4_moe_lite")
"""Models whose logits are compared with the peer's alone: transformers does not fit into memory
beside both, or its bfloat16 chooses other experts than either of them.
"""
FORKED = ("qwen3_moe", "deepseek_v2")
"""Models for which the fork of llama.cpp is a rival: it is slower with recurrent states, and
supports neither GLM-4.7-Flash's routers nor Gemma 4.
"""
LLAMA_TYPES = {
    **dict.fromkeys(("int8g128", "int8g64"), "q8_0"),
    **dict.fromkeys(("int4g32", "int4g32sym"), "q4_0"),
}
DECODE_CONTEXT = 128
SPARE = 64
"""Tokens of context that each sequence has room for beyond its prompt: those that a measurement
decodes.
"""
PREFILLS, BATCHES = (128, 512, 2048), (1, 4, 16)
TURN = (32_000, 256)
"""Tokens of a chat's history, and of the next message."""
QUICK_TURN = (512, 64)
CONTEXT = 36_864
LATENT_SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": 1536,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "vocab_size": 32_000,
}
"""Sizes of DeepSeek-V2-Lite, but with queries compressed as in DeepSeek-V2, V3 and Kimi-K2: the
peers accept uncompressed queries, as V2-Lite has them, only in a model of 27 layers.
"""
QUICK_LATENT_SHAPE = LATENT_SHAPE | {
    "q_lora_rank": 128,
    "hidden_size": 256,
    "intermediate_size": 320,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
}
HYBRID_SHAPE = {
    "hidden_size": 2048,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_hidden_layers": 6,
    "layer_types": [*["linear_attention"] * 5, "full_attention"],
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "vocab_size": 32_000,
}
QUICK_HYBRID_SHAPE = HYBRID_SHAPE | {
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
}
QUICK_SHAPE = SHAPE | {
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
}


class _Bench:
    """One random model; each side is loaded for the first case that needs it, one
    format at a time.
    """

    def __init__(
        self,
        folder: Path,
        model_type: str,
        shape: Mapping[str, Any],
        needed_bytes: int,
        *,
        has_reference: bool,
    ) -> None:
        self.has_reference = has_reference
        self._folder = folder
        self.model_type = model_type
        self._shape = shape
        self._needed_bytes = needed_bytes
        self._linear_formats = LINEAR_FORMATS[model_type]
        self.formats = tuple(self._linear_formats)
        self.has_states = "linear_num_key_heads" in shape
        self._ours: tuple[str, EngineDriver] | None = None
        self._llama: tuple[tuple[str, str, int, int], LlamaCpp] | None = None

    @cached_property
    def folder(self) -> Path:
        _check_memory(self._needed_bytes)
        context = CONTEXT if self.has_states else 4096
        write_random_model(self._folder, self._shape, context, model_type=self.model_type)
        return self._folder

    @cached_property
    def rules(self) -> Path:
        path = self._folder / "head.yaml"
        path.write_text(HEAD_RULES)
        return path

    def find_rules(self, weight_format: str) -> Path | None:
        """Return the file of rules that gives the head (the output matrix) its format if the other
        matrices have fewer bits; otherwise None.
        """
        return self.rules if self._linear_formats[weight_format].startswith("int4") else None

    @cached_property
    def spec(self) -> ModelSpec:
        return describe_model(self.folder)

    @cached_property
    def threads(self) -> int:
        return _native.recommend_threads(_native.read_topology()).threads

    @cached_property
    def rival(self) -> TransformersDriver:
        return TransformersDriver(self.folder, "grouped_mm", "bfloat16")

    @cached_property
    def check_prompt(self) -> list[int]:
        generator = torch.Generator().manual_seed(64)
        return torch.randint(0, self.spec_vocab, (64,), generator=generator).tolist()

    @cached_property
    def reference(self) -> torch.Tensor | None:
        """Logits of ``check_prompt`` by transformers, computed in advance if that model does not
        fit in memory beside ours and a peer; else None.

        Read this before loading either of them.
        """
        return None if self.has_reference else score_reference(self.folder, self.check_prompt)

    @cached_property
    def bandwidth(self) -> torch.Tensor:
        """A tensor that is read to measure the bandwidth, far larger than a cache."""
        return torch.ones(64 << 20, dtype=torch.float32)

    def ours(self, weight_format: str) -> EngineDriver:
        if self._ours is None or self._ours[0] != weight_format:
            self._ours = None  # Two formats at once may not fit.
            driver = EngineDriver(
                self.folder,
                "bfloat16",
                weight_format,
                self._linear_formats[weight_format],
                rules=self.find_rules(weight_format),
            )
            driver.watch_rules()
            self._ours = (weight_format, driver)
        return self._ours[1]

    def llama(self, peer: str, weight_format: str, batch: int, context_len: int = 0) -> LlamaCpp:
        """Return a loaded peer in the type nearest to a format; ``context_len`` 0 takes the length
        that the case kinds need.
        """
        kind = LLAMA_TYPES[weight_format]
        tokens = context_len or (DECODE_CONTEXT if batch > 1 else max(PREFILLS))
        key = (peer, kind, batch, tokens)
        if self._llama is None or self._llama[0] != key:
            self.close()
            made = LlamaCpp(
                self.folder / f"{kind}.gguf",
                peer,
                self.threads,
                tokens + SPARE,
                batch,
                folder=self.folder,
                kind=kind,
            )
            self._llama = (key, made)
        return self._llama[1]

    def close(self) -> None:
        if self._llama is not None:
            self._llama[1].close()
            self._llama = None

    def case(
        self, weight_format: str, phase: Phase, tokens: int, batch: int, peer: str | None
    ) -> BenchCase:
        """Return the case of one weight format, phase and batch against a peer, such as llama.cpp;
        peer None means transformers.
        """
        prompts: list[list[int]] = []

        def find_rival() -> LlamaCpp | None:
            return None if peer is None else self.llama(peer, weight_format, batch)

        def check() -> str:
            generator = torch.Generator().manual_seed(tokens * batch)
            shape = (batch, tokens)
            vocab_size = self.spec.vocab_size
            prompts[:] = torch.randint(0, vocab_size, shape, generator=generator).tolist()
            _ = self.reference
            wrong = self.check_logits(weight_format, prompts[0][:64], find_rival())
            if wrong is None:
                self.ours(weight_format).measure(phase, prompts)
                self.ours(weight_format).take_rule_ms()
            return wrong or "ok"

        def measure_rival() -> float:
            rival = find_rival()
            if rival is not None:
                return rival.measure(phase, prompts)
            return self.rival.measure(phase, prompts, self.threads)

        def name_rival() -> str:
            rival = find_rival()
            return self.rival_name if rival is None else rival.name

        words = f"tokens={tokens}" if phase == "prefill" else f"batch={batch}"
        if peer is not None:
            words += f" peer={peer}"
        is_decode = phase == "decode"
        limits = None
        if self.has_states and not is_decode:
            limits = {"gated delta rules": lambda: self.ours(weight_format).take_rule_ms()}
        return BenchCase(
            name=f"{WORDS[self.model_type]}format={weight_format} phase={phase} {words}",
            unit="ms",
            ours=lambda: self.ours(weight_format).measure(phase, prompts),
            check=check,
            baseline=measure_rival,
            baseline_name=lambda: f"{name_rival()} threads={self.threads}",
            ceiling=(lambda: self._measure_reading(weight_format, batch)) if is_decode else None,
            limits=limits,
        )

    def turn_case(self, weight_format: str, tokens: tuple[int, int], peer: str | None) -> BenchCase:
        """Return the case of a message after a cached history, against computing all tokens."""
        history, message = tokens
        generator = torch.Generator().manual_seed(1)
        drawn = torch.randint(0, self.spec_vocab, (history + message,), generator=generator)
        prompt: list[int] = drawn.tolist()
        whole: list[float] = []

        def measure() -> float:
            cached, all_ms = self.ours(weight_format).time_turn(prompt[:history], prompt[history:])
            whole[:] = [all_ms]
            return cached

        def check() -> str:
            _ = self.reference
            rival = None if peer is None else self.llama(peer, weight_format, 1, sum(tokens))
            return self.check_logits(weight_format, prompt[:64], rival) or "ok"

        limits = None
        if peer is not None:
            limits = {
                peer: lambda: self.llama(peer, weight_format, 1, sum(tokens)).measure_turn(
                    prompt[:history], prompt[history:]
                )
            }
        return BenchCase(
            name=f"{WORDS[self.model_type]}format={weight_format} phase=turn history={history} "
            f"message={message}" + ("" if peer is None else f" peer={peer}"),
            unit="ms",
            ours=measure,
            check=check,
            baseline=lambda: whole[0],
            baseline_name=f"computing all threads={self.threads}",
            limits=limits,
            max_rounds=3,
        )

    def check_logits(
        self, weight_format: str, tokens: list[int], peer: LlamaCpp | None
    ) -> str | None:
        """Return the side whose logits are too far from the reference or from the other side; None
        if both are near.
        """
        got = self.ours(weight_format).score(tokens)
        factor = ERROR_FACTORS.get(self.model_type, 1.0)
        largest, largest_peer = (
            min(factor * bounds.get(weight_format, 0.0), FOUR_BITS_ERROR)
            for bounds in (LARGEST_ERROR, PEER_LARGEST_ERROR)
        )
        if peer is not None and largest_peer:
            if self.reference is not None:
                return self._check_both(weight_format, peer)
            theirs = peer.score(tokens)
            error = _compare(theirs, self.rival.score(tokens))
            if not error < largest_peer:
                return f"logits of {peer.name} differ by {error:.4f}"
        error = _compare(got, self.rival.score(tokens))
        return None if error < largest else f"logits differ by {error:.4f}"

    def _check_both(self, weight_format: str, peer: LlamaCpp) -> str | None:
        """Return the side, ours or the peer's, whose logits are too far from transformers'; None if
        both are near.
        """
        assert self.reference is not None, "a model that fits beside two others"
        ours = _compare(self.ours(weight_format).score(self.check_prompt), self.reference)
        theirs = _compare(peer.score(self.check_prompt), self.reference)
        sys.stderr.write(
            f"logits differ from transformers': {ours:.4f}, {peer.name} {theirs:.4f}\n"
        )
        for name, error in (("ours", ours), (peer.name, theirs)):
            if not error < LARGEST_ALONE_ERROR[weight_format]:
                return f"logits of {name} differ by {error:.4f}"
        return None

    @property
    def spec_vocab(self) -> int:
        """Number of token ids, known before the model is written."""
        return self._shape["vocab_size"]

    @property
    def rival_name(self) -> str:
        return "transformers grouped_mm bfloat16"

    def _measure_reading(self, weight_format: str, batch: int) -> float:
        """Return the milliseconds of reading a decode step's weights, from one measurement of the
        bandwidth.
        """
        torch.set_num_threads(self.threads)
        seconds_per_byte = time_call(self.bandwidth.sum) / self.bandwidth.nbytes
        spec = self.spec
        linear = self._linear_formats[weight_format]
        plan = plan_model(
            self.folder,
            expert_format=weight_format,
            linear_format=linear,
            rules=self.find_rules(weight_format),
        )
        share = 1 - (1 - spec.top_k / spec.num_experts) ** batch
        others = sum(m.size_bytes for m in plan.matrices if m.role not in ("experts", "embedding"))
        layout = spec.state_layout
        # A decode step reads and writes the recurrent state of each sequence, so the states count
        # twice.
        states = 0 if layout is None else 2 * batch * layout.bytes_per_state
        return (plan.expert_bytes * share + others + states) * seconds_per_byte * 1e3


def make_cases(*, quick: bool, with_peers: bool = False) -> Iterator[BenchCase]:
    """Yield the cases, format by format.

    Args:
       quick: a tiny model and the ends of each range.
       with_peers: the baselines are llama.cpp and its fork if they have the format, each in cases
           of its own; they are installed if need be.
    """
    disable_progress_bar()
    shapes: dict[str, Mapping[str, Any]] = {
        "qwen3_moe": QUICK_SHAPE if quick else SHAPE,
        "deepseek_v2": QUICK_LATENT_SHAPE if quick else LATENT_SHAPE,
        "qwen3_5_moe_text": QUICK_HYBRID_SHAPE if quick else HYBRID_SHAPE,
        "glm4_moe_lite": QUICK_GLM_FLASH_SHAPE if quick else GLM_FLASH_SHAPE,
        "gemma4_text": QUICK_GEMMA4_SHAPE if quick else GEMMA4_SHAPE,
    }
    for model_type, shape in shapes.items():
        with ExitStack() as stack:
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            bench = _Bench(
                Path(scratch),
                model_type,
                shape,
                0 if quick else NEEDED_BYTES[model_type],
                has_reference=quick or not (with_peers and model_type in APART),
            )
            stack.callback(bench.close)
            yield from _list_cases(bench, quick=quick, with_peers=with_peers)
    yield from make_stored_cases(quick=quick, with_peers=with_peers)


def _list_cases(bench: _Bench, *, quick: bool, with_peers: bool) -> Iterator[BenchCase]:
    for weight_format in bench.formats:
        has_peers = with_peers and weight_format in LLAMA_TYPES
        peers = PEERS if bench.model_type in FORKED else ["llama.cpp"]
        for peer in peers if has_peers else [None]:
            for batch in BATCHES[::2] if quick else BATCHES:
                yield bench.case(weight_format, "decode", DECODE_CONTEXT, batch, peer)
            for tokens in PREFILLS[:1] if quick else PREFILLS:
                yield bench.case(weight_format, "prefill", tokens, 1, peer)
            if bench.has_states:
                yield bench.turn_case(weight_format, QUICK_TURN if quick else TURN, peer)


def _compare(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the relative error of the median token's logits: a token whose experts nearly tie may
    differ much more.
    """
    return ((got - want).norm(dim=-1) / want.norm(dim=-1)).median().item()


def _check_memory(needed: int) -> None:
    """Raise an error if fewer than ``needed`` bytes of memory are free, which both models (ours and
    the rival's) take.
    """
    free = _native.read_topology().memory_available_bytes
    if free < needed:
        raise CapacityError(
            "bench.model", f"{free >> 20} MiB of memory free: two models need {needed >> 20}"
        )


def write_random_model(
    folder: Path,
    shape: Mapping[str, Any],
    max_position_embeddings: int = 4096,
    *,
    model_type: str = "qwen3_moe",
) -> None:
    """Write a checkpoint with random bfloat16 weights, one file per layer."""
    # norm_topk_prob is set only for the classes that read it; other classes keep their default.
    weighting = {"norm_topk_prob": model_type == "qwen3_moe"} if model_type in FORKED else {}
    config = AutoConfig.for_model(
        model_type,
        **shape,
        **weighting,
        max_position_embeddings=max_position_embeddings,
        dtype="bfloat16",
    )
    write_random_weights(folder, config)


def write_random_weights(folder: Path, config: Any) -> None:
    """Write a checkpoint with random bfloat16 weights for a configuration, one file per layer."""
    family = find_family(config.model_type)
    assert family is not None, config.model_type
    config.architectures = [family.architecture]
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    files: dict[str, list[str]] = {}
    metas = build_skeleton(config).state_dict()
    for name in metas:
        parts = name.split(".")
        file = f"{parts[2]:>02}" if parts[1] == "layers" else "rest"
        files.setdefault(f"model-{file}.safetensors", []).append(name)
    for file, names in files.items():
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            # Norm weights are 1, and matrices are scaled so that the size of activations stays the
            # same from layer to layer.
            shape = metas[name].shape
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
            if len(shape) > 1:
                tensors[name].normal_(0, shape[-1] ** -0.5, generator=generator)
            elif config.model_type == "gemma4_text" and name.endswith(HEAD_NORMS):
                # Gemma 4's attention scores are not scaled: with norm weights of 1 a query would
                # attend to a single token, and a rounding would decide which.
                tensors[name].fill_(shape[-1] ** -0.25)
        # Each layer is written before the next one is made: all layers may not fit into memory
        # beside other processes.
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: file for file, own in files.items() for n in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
