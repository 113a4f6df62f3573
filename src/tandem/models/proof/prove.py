"""Proof of a configuration: our operators and transformers' eager code on one tiny random model."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from tandem._native import ThreadPool
from tandem.core.errors import TandemError
from tandem.kernels.paged import PagedBatch, PagedKvCache, SequenceChunk
from tandem.models.identity import list_config_values
from tandem.models.loading.loader import CausalModel, load_model
from tandem.models.planning.planner import plan_model
from tandem.models.proof.flips import flip_fields
from tandem.models.proof.locate import locate_difference
from tandem.models.proof.result import Check, Flip, Proof
from tandem.models.proof.shrink import NUM_TOKENS, WINDOW, shrink_config
from tandem.models.proof.tiny import (
    Reference,
    list_prompts,
    make_references,
    make_tiny,
    make_tokens,
    save_tiny,
)

__all__ = ["find_key", "hash_code", "is_dynamic", "prove_config"]

BLOCK_SIZE = 16
CHUNKS = (1, WINDOW, WINDOW + 1, 30)
FIRST_DECODED = 24
TABLE, MORE_BLOCKS = [5, 0, 3, 9], [1, 12, 8]
"""Blocks of a sequence of ``NUM_TOKENS``, and those of one that is twice as long."""
NUM_SHARED = 21
"""Tokens that the second sequence reuses from the first: one block, and a part of the next."""
SEEDS = (0, 1, 2)
"""Seeds of the proof's attempts. A near tie of a router may fall differently in float32 with one
seed; a wrong model fails with all.
"""


class _Runner:
    """Our model of a tiny checkpoint with a few KV blocks, fed in the ways in which an engine might
    feed it.

    Args:
        folder: the checkpoint.
        pool: runs the kernels.
        context: most tokens of a sequence; None: the model's own.
    """

    def __init__(self, folder: Path, pool: ThreadPool, context: int | None = None) -> None:
        plan = plan_model(folder, dtype="float32")
        plan = plan if context is None else plan.serve(context)
        self.model: CausalModel = load_model(plan, pool)
        self._num_blocks = 4 * (NUM_TOKENS // BLOCK_SIZE + 1)
        self._states = self.model.allocate_states(3)

    def make_cache(self) -> PagedKvCache:
        return self.model.allocate_kv(self._num_blocks, block_size=BLOCK_SIZE)

    def run(
        self,
        cache: PagedKvCache,
        table: list[int],
        tokens: list[int],
        start: int = 0,
        slot: int = 2,
    ) -> Tensor:
        return self._forward([SequenceChunk(tokens, start, table, "all", state_slot=slot)], cache)

    def _forward(self, chunks: list[SequenceChunk], cache: PagedKvCache) -> Tensor:
        return self.model.forward(PagedBatch.build(chunks, BLOCK_SIZE), cache, states=self._states)

    def run_pieces(self, tokens: list[int], cuts: list[int]) -> Tensor:
        cache, table = self.make_cache(), [*TABLE, *MORE_BLOCKS]
        pieces = pairwise([0, *(cut for cut in cuts if cut < len(tokens)), len(tokens)])
        return torch.cat([self.run(cache, table, tokens[a:b], a) for a, b in pieces])

    def run_reusing(self, tokens: list[int]) -> Tensor:
        """Run a sequence that takes over one KV block of an earlier one, and a copy of a part of
        the next block; return the logits.
        """
        cache = self.make_cache()
        first = self.run(cache, TABLE, tokens[:NUM_SHARED])
        if self._states is not None:
            self._states.copy(2, 0)
        self.run(cache, TABLE, tokens[NUM_SHARED:], NUM_SHARED)
        cache.copy_block(0, 7, NUM_SHARED - BLOCK_SIZE)
        rest = self.run(cache, [5, 7, 11, 2], tokens[NUM_SHARED:], NUM_SHARED, slot=0)
        return torch.cat((first, rest))

    def run_beside(self, tokens: list[int]) -> Tensor:
        """Run the sequence in one batch with another sequence, which is its own beginning, and
        return its logits.
        """
        cache = self.make_cache()
        chunks = [
            SequenceChunk(tokens[:WINDOW], 0, [1], "all", state_slot=1),
            SequenceChunk(tokens, 0, TABLE, "all", state_slot=2),
        ]
        return self._forward(chunks, cache)[WINDOW:]


FEEDS: dict[str, Callable[[_Runner, list[int]], Tensor]] = {
    "whole": lambda runner, tokens: runner.run_pieces(tokens, []),
    "chunked": lambda runner, tokens: runner.run_pieces(tokens, list(CHUNKS)),
    "decoding": lambda runner, tokens: runner.run_pieces(
        tokens, list(range(FIRST_DECODED, NUM_TOKENS))
    ),
    "reused prefix": lambda runner, tokens: runner.run_reusing(tokens),
    "in company": lambda runner, tokens: runner.run_beside(tokens),
}


@cache
def hash_code() -> str:
    """Return SHA-256 over the Python code on which the comparison with transformers depends, and
    over Tandem's version, which stands for the native core.
    """
    digest = hashlib.sha256()
    for package in ("tandem.kernels", "tandem.models"):
        root = Path(str(resources.files(package)))
        for path in sorted((*root.rglob("*.py"), *root.rglob("*.yaml"))):
            digest.update(f"{package}/{path.relative_to(root)}\0".encode())
            digest.update(path.read_bytes())
    from tandem import __version__

    digest.update(__version__.encode())
    return digest.hexdigest()


def find_key(config: Any) -> str:
    """Return the key under which a configuration's proof (the comparison on a tiny model) is
    stored: a hash of everything that its result depends on.
    """
    import transformers

    parts = [hash_code(), transformers.__version__, type(config).__name__]
    for is_true_head in (False, True):
        tiny = shrink_config(config, is_true_head=is_true_head)
        parts.append(json.dumps(list_config_values(tiny), sort_keys=True))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def prove_config(config: Any, *, with_flips: bool = True) -> Proof:
    """Compare our operators with transformers on tiny models of a configuration's class and
    switches; return the result.

    Args:
        config: transformers' configuration; any size.
        with_flips: True to also change each field on eager's side, which takes most of the time.

    Returns: the proof, whatever its outcome; ``problem`` gives the reason for a refusal.
    """
    import transformers

    proof = Proof(
        key="",
        model_type=config.model_type,
        architecture="",
        transformers=transformers.__version__,
        eager_excess=0.0,
        checks=(),
        flips=(),
    )
    # The matrices of a tiny model are so small that threads cost more time than they save.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # transformers warns about values that the tiny configuration has on purpose, so its warnings
    # are silenced.
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        proof = replace(proof, key=find_key(config))
        return _prove_with_seeds(proof, config, with_flips=with_flips)
    except TandemError as error:
        return _refuse(proof, error.what)
    except Exception as error:  # noqa: BLE001 - as its code may raise anything
        # transformers' code may raise any exception: an architecture that transformers cannot build
        # is not proved.
        text = " ".join(str(error).split())
        return _refuse(proof, f"transformers fails: {type(error).__name__}: {text[:300]}")
    finally:
        transformers.logging.set_verbosity(verbosity)
        torch.set_num_threads(num_threads)


def _prove_with_seeds(proof: Proof, config: Any, *, with_flips: bool) -> Proof:
    for seed in SEEDS:
        proof = _prove_once(proof, config, seed, with_flips=with_flips)
        if proof.is_proved or proof.flips:
            break
    return proof


def _refuse(proof: Proof, problem: str) -> Proof:
    return replace(proof, problem=problem)


@dataclass(frozen=True)
class _Variant:
    """A tiny model that may show what another one does not."""

    seed: int
    gain: float = 1.0
    """Further factor on the matrices."""
    num_tokens: int = NUM_TOKENS


VARIANTS = (_Variant(1), _Variant(2), _Variant(1, gain=2.0), _Variant(1, num_tokens=2 * NUM_TOKENS))
"""Tiny models on which changes are tried that the first one does not tell: with other weights,
larger weights, and a longer prompt.
"""


class _Tiny:
    """A tiny model, in transformers' eager code and as a checkpoint.

    Args:
        config: its configuration.
        variant: its weights and prompt.
        folder: empty folder, in which the checkpoint is saved.
    """

    def __init__(self, config: Any, variant: _Variant, folder: Path) -> None:
        self.config, self._folder = config, folder
        self.is_stepwise = is_dynamic(config)
        self.eager = make_tiny(config, variant.seed, variant.gain)
        tokens = make_tokens(config, variant.seed, variant.num_tokens)
        prompts = list_prompts(config, tokens)
        self.state = {name: tensor.clone() for name, tensor in self.eager.state_dict().items()}
        save_tiny(self.eager, folder)
        self.references = make_references(self.eager, prompts, is_stepwise=self.is_stepwise)
        """Eager's results, for the whole prompt first."""

    @property
    def eager_excess(self) -> float:
        return max(reference.eager_excess for reference in self.references)

    @property
    def is_useful(self) -> bool:
        return all(reference.is_useful for reference in self.references)

    def check(self, pool: ThreadPool, feeds: Iterable[str]) -> Iterator[Check]:
        """Yield the comparison of our model for each way of feeding the whole prompt, and of
        shorter prompts in chunks; one that fails names the operator.
        """
        whole, *shorter = self.references
        runner = _Runner(self._folder, pool)
        for name in feeds:
            yield self._compare(runner, whole, name, name)
        for reference in shorter:
            runner = _Runner(self._folder, pool, context=len(reference.tokens))
            yield self._compare(
                runner, reference, "chunked", f"up to {len(reference.tokens)} tokens"
            )

    def _compare(self, runner: _Runner, reference: Reference, feed: str, name: str) -> Check:
        logits = FEEDS[feed](runner, reference.tokens.tolist())
        check = Check(name=name, excess=reference.find_excess(logits))
        if check.is_ok:
            return check
        where = locate_difference(runner.model, self.eager, reference.tokens)
        return replace(check, where=where or "no operator alone: in how they are fed")

    def flip(self, fields: frozenset[str] | None = None) -> tuple[Flip, ...]:
        return flip_fields(
            self.config,
            self.state,
            self.references,
            is_stepwise=self.is_stepwise,
            fields=fields,
        )


def _prove_once(proof: Proof, config: Any, seed: int, *, with_flips: bool) -> Proof:
    pool = ThreadPool(1)
    with TemporaryDirectory(prefix="tandem-proof-") as folder:
        tiny = _Tiny(shrink_config(config), _Variant(seed), Path(folder))
        if not tiny.is_useful:
            what = f"eager's own float32 is {tiny.eager_excess:.3g} times the bound off"
            return _refuse(proof, what)
        checks = [*tiny.check(pool, FEEDS)]
        if all(check.is_ok for check in checks):
            checks.append(_check_true_heads(config, seed, pool))
        failed = next((check for check in checks if not check.is_ok), None)
        problem = ""
        if failed is not None:
            problem = f"{failed.name}: {failed.excess:.3g} times the bound"
            problem += f"; first differs: {failed.where}" if failed.where else ""
        flips = ()
        if with_flips and not problem:
            flips = _flip_until_noticed(tiny, pool)
            unproved = [flip.field for flip in flips if flip.outcome == "unnoticed"]
            if unproved:
                problem = f"the tiny model does not tell a change of {', '.join(unproved)}"
    return replace(
        proof,
        architecture=type(tiny.eager).__name__,
        eager_excess=tiny.eager_excess,
        checks=tuple(checks),
        flips=flips,
        problem=problem,
    )


def _flip_until_noticed(first: _Tiny, pool: ThreadPool) -> tuple[Flip, ...]:
    """Change each field; those that the first tiny model does not tell on others too, on which our
    operators agree with eager code.
    """
    flips = {flip.field: flip for flip in first.flip()}
    for variant in VARIANTS:
        left = frozenset(name for name, flip in flips.items() if flip.outcome == "unnoticed")
        if not left:
            break
        with TemporaryDirectory(prefix="tandem-proof-") as folder:
            tiny = _Tiny(first.config, variant, Path(folder))
            if tiny.is_useful and all(check.is_ok for check in tiny.check(pool, ("chunked",))):
                found = {flip.field: flip for flip in tiny.flip(left)}
                flips |= {n: f for n, f in found.items() if n in left and f.outcome == "noticed"}
    return tuple(flips.values())


def _check_true_heads(config: Any, seed: int, pool: ThreadPool) -> Check:
    with TemporaryDirectory(prefix="tandem-proof-") as folder:
        tiny = _Tiny(shrink_config(config, is_true_head=True), _Variant(seed), Path(folder))
        checks = [*tiny.check(pool, ("chunked",))]
    worst = max(checks, key=lambda check: check.excess)
    return Check(name="true head sizes", excess=worst.excess)


def is_dynamic(config: Any) -> bool:
    """Return True if RoPE angles depend on the sequence's length, so that transformers' model must
    run token by token to be comparable.
    """
    ropes: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    places = [value for value in ropes.values() if isinstance(value, dict)] or [ropes]
    return any(rope.get("rope_type") == "dynamic" for rope in places)
