"""The bits of every family, weight format and KV format, as digests that a file keeps.

    python tools/bits.py                 # compare all with bits.json, and say what differs
    python tools/bits.py --subset        # a minute's worth of cases, for every change
    python tools/bits.py --take          # write what is computed here into bits.json
    python tools/bits.py --cases 'kv/*'  # cases by name

A case is a tiny model with weights drawn from integers, so that no library's random numbers matter.
Its prompt is run whole, in chunks, token by token, after a prefix that another sequence computed,
and beside another sequence; then it goes on greedily. What is kept: digests of its logits, of the
bytes of its KV, of its states and of its tokens. Where a way of running gives other bits than the
whole prompt (transformers' own modules may), that way has a digest of its own. Cases named
`served/` run behind a scheduler instead, alone, again with a cached prefix, and over a prefill and
a decode instance.

Each instruction set that this CPU has, capped by TANDEM_MAX_ISA, has a part in the file, computed
in a process of its own. A change that means to alter bits takes them anew (`--take`) and says so.
"""

import argparse
import fnmatch
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tandem._native import ThreadPool, kernel_isas
from tandem.core.errors import UnsupportedError

FILE = Path(__file__).with_name("bits.json")
ISAS = ("avx2", "avx512_bw", "avx512_vnni", "avx512_bf16")
SUBSET_ISAS = ("avx2", "avx512_bf16")
SUBSET = (
    "family/llama/bfloat16",
    "family/gpt_oss/bfloat16",
    "family/deepseek_v32/bfloat16",
    "family/qwen3_next/bfloat16",
    "family/granitemoehybrid/bfloat16",
    "family/gemma4_text/float32",
    "family/kimi_linear/float32",
    "format/int4g32",
    "format/fp8",
    "gguf/q4_k_m",
    "gguf/IQ2_XS",
    "kv/int8/gpt_oss",
    "kv/fp8/deepseek_v3",
    "served/qwen3_next",
)
NUM_TOKENS, NUM_DECODED, BLOCK_SIZE, VOCABULARY = 52, 12, 16, 131
OWN = ("mamba2", "falcon_mamba", "jamba", "falcon_h1")
"""Models that run by transformers' own modules. Their bits are those of the library that multiplies
torch's matrices, which chooses by the maker of the CPU: a part of the file has them by maker.
"""
KV_FAMILIES = ("llama", "gpt_oss", "gemma4_text", "deepseek_v3", "deepseek_v32", "qwen3_next")
SERVED = ("llama", "gpt_oss", "deepseek_v32", "qwen3_next")
WIDE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}
"""A Qwen3 MoE whose matrices are whole groups and superblocks of every weight format."""
SWITCHES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "lfm2_moe": {
        "num_hidden_layers": 6,
        "layer_types": ["conv", "conv", "full_attention", "conv", "conv", "full_attention"],
    },
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "residual_multiplier": 0.5,
    },
}
"""Fields of families whose defaults describe no model."""
STORED_KINDS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "MXFP4", "NVFP4")
"""GGUF types that no conversion of ours writes."""


@dataclass(frozen=True)
class Case:
    """A model and how it is loaded."""

    name: str
    family: str
    dtype: str = "bfloat16"
    kv_dtype: str = "auto"
    to: str = ""
    """A GGUF mixture or type that the checkpoint is written in first."""
    weight_format: str = "auto"
    """Format in which matrices and experts are packed."""
    is_wide: bool = False


def list_cases() -> list[Case]:
    """Return all cases."""
    from tandem.kernels.weights.formats import WEIGHT_FORMATS
    from tandem.models.families.registry import FAMILIES
    from tandem.models.gguf.mixtures import MIXTURES

    dtypes = ("float32", "bfloat16")
    cases = [Case(f"family/{name}/{d}", name, d) for name in FAMILIES for d in dtypes]
    cases += [Case(f"own/{name}", name, "float32") for name in OWN]
    cases += [
        Case(f"kv/{kv}/{name}", name, kv_dtype=kv) for kv in ("int8", "fp8") for name in KV_FAMILIES
    ]
    for name, kind in WEIGHT_FORMATS.items():
        if not kind.is_stored_only and kind.down is None and kind.group_size <= 256:
            cases.append(Case(f"format/{name}", "qwen3_moe", weight_format=name, is_wide=True))
    for to in (*MIXTURES, *STORED_KINDS):
        cases.append(Case(f"gguf/{to}", "qwen3_moe", to=to, is_wide=True))
    cases += [Case(f"served/{name}", name) for name in SERVED]
    return cases


def main() -> int:
    """Compare or take; return the number of differences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--take", action="store_true", help="write the digests into bits.json")
    parser.add_argument("--subset", action="store_true", help="a minute's worth of cases")
    parser.add_argument("--cases", default="*", help="pattern of the cases' names")
    parser.add_argument("--isa", default="", help="one instruction set only")
    parser.add_argument("--print", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.print:
        _print_digests(arguments.cases.split(","))
        return 0
    present = [isa for isa in ISAS if isa in kernel_isas()]
    isas = [arguments.isa] if arguments.isa else present
    patterns = arguments.cases
    if arguments.subset:
        isas = [isa for isa in isas if isa in SUBSET_ISAS] or isas[-1:]
        patterns = ",".join(SUBSET)
    kept = json.loads(FILE.read_text()) if FILE.exists() else {}
    num_differences = 0
    for isa in isas:
        found = _run_capped(isa, patterns)
        part = kept.setdefault(isa, {})
        if arguments.take:
            part.update(found)
            continue
        for name, digests in found.items():
            if name.startswith("own/") and name not in part:
                sys.stdout.write(f"{isa} {name}: not compared, {FILE.name} has no such CPU\n")
                continue
            if part.get(name) == digests:
                continue
            num_differences += 1
            sys.stdout.write(f"{isa} {name}: {_explain(part.get(name), digests)}\n")
        sys.stdout.write(f"{isa}: {len(found)} cases\n")
        sys.stdout.flush()
    if arguments.take:
        kept = {isa: dict(sorted(part.items())) for isa, part in sorted(kept.items())}
        FILE.write_text(json.dumps(kept, indent=1) + "\n")
    return num_differences


def _run_capped(isa: str, patterns: str) -> dict[str, dict[str, str]]:
    command = [sys.executable, __file__, "--print", "--cases", patterns]
    environment = os.environ | {"TANDEM_MAX_ISA": isa, "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, timeout=3600, check=True, text=True
    )
    return json.loads(done.stdout)


def _explain(kept: dict[str, str] | None, found: dict[str, str]) -> str:
    if kept is None:
        return f"is not in {FILE.name}: {found}"
    names = sorted({*kept, *found})
    parts = [f"{n} {kept.get(n, '-')} -> {found.get(n, '-')}" for n in names]
    return ", ".join(
        part for part, n in zip(parts, names, strict=True) if kept.get(n) != found.get(n)
    )


def _print_digests(patterns: list[str]) -> None:
    import torch
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    digests: dict[str, dict[str, str]] = {}
    for case in list_cases():
        if any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns):
            with tempfile.TemporaryDirectory(prefix="tandem-bits-") as folder:
                name = f"{case.name}/{_find_maker()}" if case.name.startswith("own/") else case.name
                try:
                    digests[name] = _run_case(case, Path(folder))
                except Exception as error:
                    error.add_note(f"in the case {case.name}")
                    raise
    sys.stdout.write(json.dumps(digests))


def _find_maker() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split()[-1] for line in lines if line.startswith("vendor_id")), "other")


def _run_case(case: Case, folder: Path) -> dict[str, str]:
    path = _save(case, folder)
    if case.name.startswith("served/"):
        return _digest_served(path)
    ways = _OwnWays(path) if case.name.startswith("own/") else _Ways(path, case)
    return _digest_ways(ways)


# What is run: checkpoints whose weights are integers times powers of two.


def _save(case: Case, folder: Path) -> Path:
    import torch

    from tandem.models.proof.tiny import build_eager, save_tiny

    config = _make_config(case)
    model = build_eager(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(torch.from_numpy(_draw(name, tensor)))
        for name, buffer in model.named_buffers():
            is_stored = name in model.state_dict()
            if is_stored and buffer.is_floating_point():
                buffer.copy_(torch.from_numpy(_draw(name, buffer)))
    place = folder / "model"
    save_tiny(model, place)
    _save_tokenizer(place)
    if case.to:
        return _write_gguf(case.to, place, folder)
    return place


def _save_tokenizer(place: Path) -> None:
    """Write a tokenizer of words, which an instance wants to have; prompts are ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{i}": i for i in range(VOCABULARY)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def _make_config(case: Case) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from tandem.models.families.registry import FAMILIES
    from tandem.models.proof.shrink import shrink_config

    family = FAMILIES.get(case.family)
    name = (family.config_type if family else "") or case.family
    if case.is_wide:
        return CONFIG_MAPPING[name](**WIDE)
    if case.name.startswith("own/"):
        from tandem.models.own.shrink import list_tiny

        return next(list_tiny(CONFIG_MAPPING[name]()))
    return shrink_config(CONFIG_MAPPING[name](**SWITCHES.get(case.family, {})))


def _draw(name: str, tensor: Any) -> np.ndarray[Any, Any]:
    """Return values of a tensor, float32: integers of 7 bits times a power of two, about the value
    that all items of a vector begin with.
    """
    noise = np.random.default_rng(zlib.crc32(name.encode())).integers(-63, 64, tuple(tensor.shape))
    if tensor.dim() < 2:
        # A norm begins at 1 (or at 0 if it adds 1), a bias at 0; others begin at random values.
        is_even = bool((tensor == tensor[0]).all())
        return (float(tensor[0]) + noise / 256 if is_even else noise / 64).astype(np.float32)
    spread = math.floor(math.log2(1.4 / 36 / math.sqrt(tensor.shape[-1])))
    return (noise * 2.0**spread).astype(np.float32)


def _write_gguf(to: str, place: Path, folder: Path) -> Path:
    from tandem.models.gguf.mixtures import MIXTURES
    from tandem.models.gguf_export import export_gguf

    out = folder / "gguf"
    export_gguf(place, to if to in MIXTURES else "q8_0", out)
    (path,) = out.glob("*.gguf")
    if to in MIXTURES:
        return path
    return _replace_blocks(path, to, folder / f"{to}.gguf")


def _replace_blocks(source: Path, kind: str, path: Path) -> Path:
    """Write a file again with random blocks of another type in place of its Q8_0 ones."""
    from tandem.models.sources.gguf_header import read_gguf_header
    from tandem.models.sources.gguf_writer import PlannedTensor, write_gguf

    header = read_gguf_header(source)
    data = np.memmap(source, np.uint8, "r")
    planned: list[PlannedTensor] = []
    for tensor in header.tensors.values():
        is_replaced = tensor.kind == "Q8_0" and tensor.name.startswith("blk.")
        planned.append(
            PlannedTensor(tensor.name, kind if is_replaced else tensor.kind, tensor.shape)
        )

    def make(tensor: PlannedTensor) -> Any:
        old = header.tensors[tensor.name]
        if tensor.kind == old.kind:
            return data[old.begin : old.begin + tensor.size_bytes]
        return _draw_blocks(tensor.name, kind, tensor.size_bytes)

    with path.open("wb") as file:
        write_gguf(file, header.metadata, planned, make)
    return path


def _draw_blocks(name: str, kind: str, size_bytes: int) -> np.ndarray[Any, Any]:
    from tandem.models.sources.gguf_header import BLOCK_SIZES

    _, width = BLOCK_SIZES[kind]
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    blocks = rng.integers(0, 256, (size_bytes // width, width), np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = 122  # 2^-5
    elif kind == "NVFP4":
        blocks[:, :4] = blocks[:, :4] % 16 + 24  # e4m3 scales of about 2^-4
    else:
        blocks[:, :2] = np.frombuffer(np.float16(2.0**-10).tobytes(), np.uint8)
    return blocks.reshape(-1)


# How it is run.


def _make_prompt() -> list[int]:
    return np.random.default_rng(7).integers(3, VOCABULARY, NUM_TOKENS).tolist()


class _Ways:
    """The ways of running a prompt with operators; each in KV memory of its own, zeroed."""

    def __init__(self, path: Path, case: Case) -> None:
        from tandem.models.loading.loader import load_model
        from tandem.models.planning.planner import plan_model

        kind = case.weight_format
        plan = plan_model(path, dtype=case.dtype, expert_format=kind, linear_format=kind)
        self._model = load_model(plan, ThreadPool(2))
        self._kv_dtype = case.kv_dtype
        self._states = self._model.allocate_states(3)
        self._cache = self._make_cache()

    def _make_cache(self) -> Any:
        cache = self._model.allocate_kv(16, block_size=BLOCK_SIZE, kv_dtype=self._kv_dtype)
        for pool in (cache, cache.windows):
            if pool is not None:
                pool.view_bytes()[:] = 0
        return cache

    def begin(self) -> None:
        """Forget all sequences."""
        self._cache = self._make_cache()

    def run(self, *chunks: tuple[list[int], int, list[int], int]) -> Any:
        """Run (tokens, start, block table, slot) of sequences in one step; return all logits."""
        from tandem.kernels.paged import PagedBatch, SequenceChunk

        batch = PagedBatch.build(
            [
                SequenceChunk(t, start, table, "all", state_slot=slot)
                for t, start, table, slot in chunks
            ],
            BLOCK_SIZE,
        )
        return self._model.forward(batch, self._cache, states=self._states)

    def share(self, source: int, target: int, num_tokens: int) -> None:
        """Give slot 0 the state of slot 2, and copy a part of a block."""
        if self._states is not None:
            self._states.copy(2, 0)
        self._cache.copy_block(source, target, num_tokens)

    def digest_memory(self) -> dict[str, str]:
        """Return digests of all KV and of the state in slot 2."""
        pools = [p for p in (self._cache, self._cache.windows) if p is not None]
        digests = {"kv": _digest(*(pool.view_bytes() for pool in pools))}
        if self._states is not None:
            slots = self._states.view_bytes().reshape(self._states.num_slots, -1)
            digests["states"] = _digest(slots[2])
        return digests


class _OwnWays:
    """The same by transformers' own modules, whose caches are objects."""

    def __init__(self, path: Path) -> None:
        from tandem.models.own.model import load_own
        from tandem.models.own.plan import plan_own

        refusal = UnsupportedError("tools.bits", "the case asks for transformers' own modules")
        plan = plan_own(path, refusal, proof="off", dtype="float32")
        self._model = load_own(plan, ThreadPool(1))
        self._states = self._model.allocate_states(3)

    def begin(self) -> None:
        """Forget all sequences."""
        self._states = self._model.allocate_states(3)

    def run(self, *chunks: tuple[list[int], int, list[int], int]) -> Any:
        """Run sequences as ``_Ways.run`` does."""
        from tandem.kernels.paged import PagedBatch, SequenceChunk

        batch = PagedBatch.build(
            [
                SequenceChunk(t, start, table, "all", state_slot=slot)
                for t, start, table, slot in chunks
            ],
            BLOCK_SIZE,
        )
        return self._model.forward(batch, self._states)

    def share(self, source: int, target: int, num_tokens: int) -> None:
        """Give slot 0 the state of slot 2."""
        del source, target, num_tokens
        self._states.copy(2, 0)

    def digest_memory(self) -> dict[str, str]:
        """Return nothing: what a cache object holds is transformers' own affair."""
        return {}


TABLE = [5, 0, 3, 9, 1]
SHARED, OTHER_TABLE = 21, [5, 7, 11, 2, 8]
"""Tokens taken over from another sequence: one block and a part of the next."""


def _run_pieces(ways: Any, tokens: list[int], cuts: Iterable[int]) -> list[Any]:
    ends = [0, *cuts, len(tokens)]
    return [ways.run((tokens[a:b], a, TABLE, 2)) for a, b in pairwise(ends)]


def _run_shared(ways: Any, tokens: list[int]) -> list[Any]:
    first = ways.run((tokens[:SHARED], 0, TABLE, 2))
    ways.share(0, 7, SHARED - BLOCK_SIZE)
    return [first, ways.run((tokens[SHARED:], SHARED, OTHER_TABLE, 0))]


def _run_beside(ways: Any, tokens: list[int]) -> list[Any]:
    return [ways.run((tokens[:11], 0, [4], 1), (tokens, 0, TABLE, 2))[11:]]


WAYS: dict[str, Callable[[Any, list[int]], list[Any]]] = {
    "chunked": lambda ways, tokens: _run_pieces(ways, tokens, (1, 12, 30)),
    "decoding": lambda ways, tokens: _run_pieces(ways, tokens, range(24, NUM_TOKENS)),
    "cached": _run_shared,
    "beside": _run_beside,
}


def _digest_ways(ways: Any) -> dict[str, str]:
    import torch

    tokens = _make_prompt()
    (whole,) = _run_pieces(ways, tokens, ())
    assert bool(torch.isfinite(whole).all()), "logits are not finite"
    digests = {"logits": _digest(whole.numpy()), **ways.digest_memory()}
    following = [int(whole[-1].argmax())]
    rows: list[Any] = []
    for place in range(NUM_TOKENS, NUM_TOKENS + NUM_DECODED):
        rows.append(ways.run((following[-1:], place, TABLE, 2)).numpy())
        following.append(int(rows[-1][-1].argmax()))
    digests["decoded"] = _digest(*rows)
    digests["tokens"] = _digest(np.array(following, np.int64))
    for name, run in WAYS.items():
        ways.begin()
        found = _digest(*(piece.numpy() for piece in run(ways, tokens)))
        if found != digests["logits"]:
            digests[name] = found
    return digests


def _digest_served(path: Path) -> dict[str, str]:
    """Digest the tokens and log-probabilities of answers: greedy and sampled ones, of prompts that
    share a prefix, by one instance and by a prefill and a decode instance.
    """
    prompt = _make_prompt()
    prompts = [prompt, prompt[:40] + prompt[:9], prompt, prompt[:30]]
    digests: dict[str, str] = {}
    for name, instances in {"unified": {}, "disaggregated": {"prefill": 1, "decode": 1}}.items():
        found = _digest(*_serve(path, prompts, instances))
        if found not in digests.values():
            digests[name] = found
    return digests


def _serve(path: Path, prompts: list[list[int]], instances: dict[str, int]) -> Iterator[Any]:
    from tandem.llm import LLM

    settings: dict[str, Any] = {"max_model_len": 128, "block_size": BLOCK_SIZE, **instances}
    samplings: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.8, "seed": 5})
    with LLM(str(path), **settings) as llm:
        for prompt in prompts:
            for sampling in samplings:
                (answer,) = llm.generate(
                    [prompt], max_tokens=16, logprobs=3, ignore_eos=True, **sampling
                )
                yield np.array(answer.token_ids, np.int64)
                yield np.array([one.logprob for one in answer.logprobs], np.float64)


def _digest(*arrays: Any) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(min(main(), 100))
