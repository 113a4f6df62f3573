"""The proof that a class's own cache object, continued, gives the results of the whole sequence.

As in the proof of our operators, a tiny random model of the configuration's class is saved by
transformers and loaded as a checkpoint. It must give the logits of eager code in float64: with a
prompt in pieces, decoding, from a copy of a cache, and beside another sequence. Feeding in pieces
is tried first, then the whole prompt at once, then token by token; if none works, the class is
refused.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from tandem._native import ThreadPool
from tandem.core.errors import TandemError, UnsupportedError
from tandem.core.model.plan import NO_FORMAT, WHOLE_PROMPT, FormatChoice, ModelPlan, OwnModules
from tandem.kernels.paged import PagedBatch, SequenceChunk
from tandem.models.families import Checkpoint
from tandem.models.identity import list_config_values
from tandem.models.own.gate import open_own
from tandem.models.own.model import OwnModel, load_own
from tandem.models.own.shrink import MAX_WEIGHTS, TINY_VOCAB, list_tiny
from tandem.models.proof.prove import hash_code
from tandem.models.proof.result import Check
from tandem.models.proof.shrink import NUM_TOKENS, require_crossed
from tandem.models.proof.tiny import build_eager, save_tiny

__all__ = ["OwnProof", "find_own_proof", "prove_own", "require_own_proof"]

logger = logging.getLogger(__name__)

DEFAULT_ROOT = Path("~/.cache/tandem/proofs")
MAX_BYTES = 1 << 20
TINY_PIECE, PROMPT_LEN = 16, 46
"""Sizes of the proof in tokens: a piece that the tiny model is fed at a time, and its prompt; the
remaining tokens are decoded.
"""
CHUNKS = (5, 16, 20, 33, 46)
"""Positions at which the proof's prompt is cut into chunks, as a scheduler might cut it."""
BRANCH = 32
"""Length in tokens of the prefix that the proof's second sequence reuses from the first, a whole
number of pieces.
"""
CONDITION, FLOOR = 4.0, 4e-6
"""Factors of the error bound: this many times the float32 error of eager code, but at least this
share of the largest logit.
"""
NUM_DRAWS = 4
"""Further float32 runs of eager code, each with other last bits of its weights; the largest error
counts. One run is one draw of the rounding errors. If they cancel in the logit that amplifies them
most, even exactly computed experts differ from it by several times as much.
"""
MAX_EAGER = 1e-3
"""Largest float32 error of eager code, relative to the largest logit, at which bugs can still be
told from rounding."""
WAYS = tuple(
    (name, piece, has_ours)
    for name, piece in (("pieces", TINY_PIECE), ("whole", WHOLE_PROMPT), ("steps", 1))
    for has_ours in (True, False)
)
"""Ways to serve a class, tried in order until one is proved: name, tokens fed at a time, and
whether our operators compute the routed experts.
"""
SEEDS = (0, 1)
GAIN, SPREAD = 1.3, 0.3
"""Gain of random matrices and spread of random vectors, as in ``proof.tiny``."""


class OwnProof(msgspec.Struct, frozen=True, kw_only=True):
    """The result of trying a class's own cache object on tiny models of one configuration: whether
    feeding tokens in pieces gives what feeding them at once gives.
    """

    key: str
    """SHA-256 over the code, transformers' version and the tiny configuration; empty: not
    stored.
    """
    model_type: str
    transformers: str
    piece: int = 0
    """Tokens of a piece that is proved, 1 or ``WHOLE_PROMPT``; 0: any."""
    has_our_experts: bool = False
    """True if the class is proved with our operators in place of its routed experts."""
    checks: tuple[Check, ...] = ()
    problem: str = ""
    """Reason for a refusal; empty: proved."""

    @property
    def is_proved(self) -> bool:
        """True if models of this configuration may run, as no comparison on the tiny model
        failed.
        """
        return not self.problem


def require_own_proof(checkpoint: Checkpoint, root: Path = DEFAULT_ROOT) -> OwnProof:
    """Return the proof (a test on tiny models) that a checkpoint's class computes the same when its
    cache is continued.

    Args:
        checkpoint: opened by ``open_own``.
        root: folder in which proofs are stored.

    Raises: UnsupportedError (not proved, with the reason).
    """
    proof = find_own_proof(checkpoint, root)
    if not proof.is_proved:
        raise UnsupportedError("models.prove_own", proof.problem, field="model_type")
    return proof


def find_own_proof(checkpoint: Checkpoint, root: Path | None = DEFAULT_ROOT) -> OwnProof:
    """Return the proof of a checkpoint's class (the result of a test on tiny models): a stored one,
    or a new one.

    Args:
        checkpoint: opened by ``open_own``.
        root: folder in which proofs are stored; None: make a new proof and do not store it.
    """
    kept = None if root is None else _find_kept(checkpoint, root.expanduser())
    if kept is not None:
        return kept
    logger.info("event=own_proof_begins model_type=%s", checkpoint.spec.model_type)
    proof = prove_own(checkpoint.config)
    logger.info("event=own_proof_ended problem=%r piece=%d", proof.problem, proof.piece)
    if root is not None and proof.key:
        _write(root.expanduser() / f"own-{proof.key}.json", proof)
    return proof


def prove_own(config: Any) -> OwnProof:
    """Test on tiny models of a configuration that feeding a class's own cache object in pieces
    gives what one call gives; return the result.

    Args:
        config: transformers' configuration; any size.
    """
    import transformers

    kept = config.model_type, transformers.__version__
    proof = OwnProof(key="", model_type=kept[0], transformers=kept[1])
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        proof = msgspec.structs.replace(proof, key=_find_key(config))
        return _prove_any(proof, config)
    except TandemError as error:
        return _refuse(proof, error.what)
    except Exception as error:  # noqa: BLE001 - as its code may raise anything
        return _refuse(proof, _describe(error))
    finally:
        transformers.logging.set_verbosity(verbosity)
        torch.set_num_threads(num_threads)


def _refuse(proof: OwnProof, problem: str) -> OwnProof:
    return msgspec.structs.replace(proof, problem=problem)


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"transformers fails: {type(error).__name__}: {text[:300]}"


def _find_key(config: Any) -> str:
    import transformers

    tiny = [json.dumps(list_config_values(t), sort_keys=True) for t in list_tiny(config)]
    parts = [hash_code(), transformers.__version__, type(config).__name__, *tiny]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _prove_any(proof: OwnProof, config: Any) -> OwnProof:
    """Try tiny configurations of the class until a model of one gives the right logits; return that
    result, else the first failure.
    """
    found = _refuse(proof, "no tiny configuration of its class can be made")
    first = None
    for tiny in list_tiny(config):
        for seed in SEEDS:
            try:
                found = _prove_once(proof, tiny, seed)
            except TandemError as error:
                found = _refuse(proof, error.what)
                break
            except Exception as error:  # noqa: BLE001 - as its code may raise anything
                found = _refuse(proof, _describe(error))
                break
            if found.is_proved:
                return found
        if found.checks:
            return found
        first = found if first is None else first
    # Return the first, smallest configuration's failure: larger ones may fail only because of their
    # size.
    return found if first is None else first


def _prove_once(proof: OwnProof, tiny: Any, seed: int) -> OwnProof:
    require_crossed(tiny)
    with torch.device("meta"):
        size = sum(p.numel() for p in build_eager(tiny).parameters())
    if size > MAX_WEIGHTS:
        return _refuse(proof, f"its smallest model has {size:,} weights: too many for a proof")
    eager = _make_tiny(tiny, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    vocab = min(TINY_VOCAB, eager.get_output_embeddings().weight.shape[0])
    tokens = torch.randint(3, vocab, (NUM_TOKENS,), generator=generator)
    with TemporaryDirectory(prefix="tandem-proof-") as folder:
        save_tiny(eager, Path(folder))
        rounded = _run_whole(eager, tokens)
        others = _run_perturbed(eager, tokens)
        with _float64():
            exact = _run_whole(eager.double(), tokens).numpy()
        top = float(np.max(np.abs(exact)))
        off = _find_error(rounded, exact)
        if not off <= MAX_EAGER * top:
            what = f"eager's own float32 is {off:.3g} off, where logits reach {top:.3g}"
            return _refuse(proof, what)
        # A run that chose other experts, at a near tie, tells nothing of rounding.
        draws = [off, *(_find_error(other, exact) for other in others)]
        off = max(draw for draw in draws if draw <= MAX_EAGER * top)
        bound = max(CONDITION * off, FLOOR * top)
        checks: list[Check] = []
        problems: list[str] = []
        for name, piece, has_ours in WAYS:
            label = f"{name}, our experts" if has_ours else name
            try:
                model = load_own(_plan_tiny(Path(folder), piece, has_ours=has_ours), ThreadPool(1))
                if has_ours and not model.num_placed:
                    continue  # It has none, and the next way is the same.
                found = [*_check(model, tokens.tolist(), exact, bound, label)]
            except Exception as error:  # noqa: BLE001 - as its code may raise anything
                problems.append(f"{label}: {_describe(error)}")
                continue
            checks += found
            wrong = next((check for check in found if not check.is_ok), None)
            if wrong is None:
                served = 0 if piece == TINY_PIECE else piece
                return msgspec.structs.replace(
                    proof, piece=served, has_our_experts=has_ours, checks=tuple(checks)
                )
            problems.append(f"{wrong.name}: {wrong.excess:.3g} times the bound")
    what = "its cache computes something else when it is continued: " + "; ".join(problems)
    return msgspec.structs.replace(proof, checks=tuple(checks), problem=what)


@contextmanager
def _float64() -> Iterator[None]:
    """Make torch use float64 for code that names no dtype or calls ``Tensor.float``."""
    before, to_float = torch.get_default_dtype(), Tensor.float
    torch.set_default_dtype(torch.float64)
    # Model code that casts to float32 for precision would lower float64 here, so Tensor.float casts
    # to float64.
    Tensor.float = Tensor.double
    try:
        yield
    finally:
        Tensor.float = to_float
        torch.set_default_dtype(before)


@torch.inference_mode()
def _run_whole(eager: Any, tokens: Tensor) -> Tensor:
    logits = eager(input_ids=tokens[None], use_cache=False).logits[0]
    if len(logits) != len(tokens):
        what = f"{type(eager).__name__} gives {len(logits)} rows of logits for {len(tokens)} tokens"
        raise UnsupportedError("models.prove_own", what)
    return logits


def _find_error(logits: Tensor, exact: np.ndarray) -> float:
    return float(np.max(np.abs(logits.double().numpy() - exact)))


def _run_perturbed(eager: Any, tokens: Tensor) -> list[Tensor]:
    """Return the logits of float32 runs of eager code, each with weights that are off by up to one
    float32 epsilon, at random.
    """
    generator = torch.Generator().manual_seed(0)
    weights = [(parameter, parameter.detach().clone()) for parameter in eager.parameters()]
    runs: list[Tensor] = []
    with torch.no_grad():
        for _ in range(NUM_DRAWS):
            for parameter, weight in weights:
                shape = weight.shape
                steps = torch.randint(-1, 2, shape, generator=generator, dtype=torch.int8)
                parameter.copy_(weight * (1 + steps * torch.finfo(torch.float32).eps))
            runs.append(_run_whole(eager, tokens))
        for parameter, weight in weights:
            parameter.copy_(weight)
    return runs


def _make_tiny(config: Any, seed: int) -> Any:
    """Build transformers' eager model of a tiny configuration with random weights."""
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = build_eager(config)
    finally:
        torch.random.set_rng_state(state)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if parameter.dim() > 1:
                parameter.copy_(GAIN * noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(SPREAD * noise)
    return model


def _plan_tiny(folder: Path, piece: int, *, has_ours: bool) -> ModelPlan:
    checkpoint = open_own(folder)
    plain = FormatChoice(weight_format=NO_FORMAT, reason="")
    return ModelPlan(
        folder=str(folder),
        spec=msgspec.structs.replace(checkpoint.spec, dtype="float32"),
        device="cpu",
        config=list_config_values(checkpoint.config),
        layers=(),
        modules=(),
        other_matrices=(),
        vector_bytes=0,
        experts=plain,
        linear=plain,
        router=plain,
        expert_parts=1,
        packed_cache="off",
        own=OwnModules(
            reason="", piece=piece, token_bytes=0, fixed_bytes=0, has_our_experts=has_ours
        ),
    )


class _Runner:
    """A tiny model of transformers' own modules, fed in batches as the engine would feed it."""

    def __init__(self, model: OwnModel) -> None:
        self._model = model
        self.slots = model.allocate_states(3)

    def run(self, *chunks: tuple[int, list[int], int]) -> Tensor:
        """Return the logits of all tokens of chunks, each (slot of the sequence, tokens, position
        of the first), run as one batch.
        """
        sequences = [
            SequenceChunk(
                ids, start, range(NUM_TOKENS), "all", state_slot=slot, prompt_len=PROMPT_LEN
            )
            for slot, ids, start in chunks
        ]
        return self._model.forward(PagedBatch.build(sequences, TINY_PIECE), self.slots)

    def decode(self, tokens: list[int], slot: int) -> list[Tensor]:
        return [self.run((slot, [tokens[i]], i)) for i in range(PROMPT_LEN, len(tokens))]


def _feed_whole(runner: _Runner, tokens: list[int]) -> Tensor:
    prompt = runner.run((0, tokens[:PROMPT_LEN], 0))
    return torch.cat([prompt, *runner.decode(tokens, 0)])


def _feed_chunked(runner: _Runner, tokens: list[int]) -> Tensor:
    rows = [runner.run((0, tokens[a:b], a)) for a, b in zip((0, *CHUNKS), CHUNKS, strict=False)]
    return torch.cat([*rows, *runner.decode(tokens, 0)])


def _feed_reused(runner: _Runner, tokens: list[int]) -> Tensor:
    """Feed a sequence that continues from a copy of another's cache object, after the other has
    continued differently; return its logits.
    """
    first = runner.run((0, tokens[:BRANCH], 0))
    runner.slots.copy(0, 1)
    runner.run((0, [*reversed(tokens[: PROMPT_LEN - BRANCH])], BRANCH))
    rest = runner.run((1, tokens[BRANCH:PROMPT_LEN], BRANCH))
    return torch.cat([first, rest, *runner.decode(tokens, 1)])


def _feed_beside(runner: _Runner, tokens: list[int]) -> Tensor:
    other = [*reversed(tokens)]
    both = runner.run((2, other[:PROMPT_LEN], 0), (0, tokens[:PROMPT_LEN], 0))
    rows = [both[PROMPT_LEN:]]
    rows += [
        runner.run((2, [other[i]], i), (0, [tokens[i]], i))[1:]
        for i in range(PROMPT_LEN, len(tokens))
    ]
    return torch.cat(rows)


FEEDS: dict[str, Callable[[_Runner, list[int]], Tensor]] = {
    "whole": _feed_whole,
    "chunked": _feed_chunked,
    "reused prefix": _feed_reused,
    "in company": _feed_beside,
}


def _check(
    model: OwnModel, tokens: list[int], exact: np.ndarray, bound: float, way: str
) -> Iterator[Check]:
    """Compare the logits of each way of feeding tokens with those of transformers' eager code, and
    the bits of decoded tokens between the ways.
    """
    decoded: list[np.ndarray] = []
    for name, feed in FEEDS.items():
        logits = feed(_Runner(model), tokens).numpy()
        off = float(np.max(np.abs(logits.astype(np.float64) - exact))) / bound
        yield Check(name=f"{way}, {name}", excess=off if np.isfinite(off) else float("inf"))
        decoded.append(logits[PROMPT_LEN:])
    is_equal = all(np.array_equal(decoded[0], other) for other in decoded[1:])
    yield Check(name=f"{way}, same bits", excess=0.0 if is_equal else float("inf"))


def _find_kept(checkpoint: Checkpoint, root: Path) -> OwnProof | None:
    """Return the stored proof of the checkpoint's configuration; None if there is none that can be
    trusted.
    """
    try:
        key = _find_key(checkpoint.config)
        path = root / f"own-{key}.json"
        info = path.stat()
        if info.st_uid != os.getuid() or info.st_mode & 0o022 or info.st_size > MAX_BYTES:
            return None
        proof = msgspec.json.decode(path.read_bytes(), type=OwnProof)
    except Exception:  # noqa: BLE001 - what transformers raises, the proof reports
        return None
    return proof if proof.key == key else None


def _write(path: Path, proof: OwnProof) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(msgspec.json.encode(proof))
        Path(file.name).replace(path)
    except OSError as error:
        logger.warning("event=proof_not_kept path=%s why=%r", path, str(error))
