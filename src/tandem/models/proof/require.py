"""Requirement of a proof before a model is loaded, and storage of proofs.

A family of ``FAMILIES`` is proved in CI, with the transformers version ``PROVED_WITH``. Any other
is proved at its first use, in seconds; the outcome is stored in the user's cache folder under a
hash of everything that it depends on.
"""

import logging
import os
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Literal

import msgspec

from tandem.core.errors import UnsupportedError
from tandem.models.families import FAMILIES, Checkpoint, open_checkpoint
from tandem.models.families.registry import PROVED_WITH
from tandem.models.proof.prove import find_key, prove_config
from tandem.models.proof.result import Proof

__all__ = ["ProofPolicy", "find_proof", "require_proof"]

logger = logging.getLogger(__name__)

ProofPolicy = Literal["auto", "always", "off"]
DEFAULT_ROOT = Path("~/.cache/tandem/proofs")
MAX_BYTES = 1 << 20


def require_proof(
    path_or_id: str | Path, policy: ProofPolicy = "auto", root: Path = DEFAULT_ROOT
) -> Proof | None:
    """Make sure that a checkpoint's architecture is proved: that our operators agree with
    transformers on a tiny model of it; compare them now if needed.

    Args:
        path_or_id: as for ``open_checkpoint``; no weight is read.
        policy: ``auto`` trusts CI for families proved there; ``always`` does not; ``off`` requires
            no proof.
        root: folder in which proofs are stored.

    Returns: the proof; None if none was required.

    Raises: the errors of ``open_checkpoint``; UnsupportedError (not proved; names the first layer
        and operator that differ).
    """
    if policy == "off":
        return None
    checkpoint = open_checkpoint(path_or_id)
    if policy == "auto" and _is_proved_in_ci(checkpoint.spec.model_type):
        return None
    proof = find_proof(checkpoint, root)
    if not proof.is_proved:
        raise UnsupportedError(
            "models.require_proof",
            f"{proof.model_type} does not run right here: {proof.problem}. `tandem verify` prints "
            "the proof",
            field="model_type",
        )
    return proof


def _is_proved_in_ci(model_type: str) -> bool:
    import transformers

    return model_type in FAMILIES and transformers.__version__.startswith(f"{PROVED_WITH}.")


def find_proof(checkpoint: Checkpoint, root: Path | None = DEFAULT_ROOT) -> Proof:
    """Return the proof of a checkpoint's configuration (the result of comparing our operators with
    transformers on a tiny model): a stored one, or a new one.

    Args:
        checkpoint: the opened checkpoint.
        root: folder in which proofs are stored; None: make a new proof and do not store it.
    """
    kept = None if root is None else _find_kept(checkpoint, root.expanduser())
    if kept is not None:
        return kept
    logger.info("event=proof_begins model_type=%s", checkpoint.spec.model_type)
    proof = prove_config(checkpoint.config)
    logger.info("event=proof_ended is_proved=%s problem=%r", proof.is_proved, proof.problem)
    if root is not None and proof.key:
        _write(root.expanduser() / f"{proof.key}.json", proof)
    return proof


def _find_kept(checkpoint: Checkpoint, root: Path) -> Proof | None:
    if not root.is_dir():
        return None
    try:
        key = find_key(checkpoint.config)
    except Exception:  # noqa: BLE001 - what transformers raises, the proof reports
        return None
    return _read(root / f"{key}.json", key)


def _read(path: Path, key: str) -> Proof | None:
    """Return the proof stored in a file, if it is the one of this key (a hash of configuration and
    code); None if there is none that can be trusted.
    """
    try:
        info = path.stat()
        if info.st_uid != os.getuid() or info.st_mode & 0o022 or info.st_size > MAX_BYTES:
            return None
        proof = msgspec.json.decode(path.read_bytes(), type=Proof)
    except (OSError, msgspec.MsgspecError):
        return None
    return proof if proof.key == key else None


def _write(path: Path, proof: Proof) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(msgspec.json.encode(proof))
        Path(file.name).replace(path)
    except OSError as error:
        logger.warning("event=proof_not_kept path=%s why=%r", path, str(error))
