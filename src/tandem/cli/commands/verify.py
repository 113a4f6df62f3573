"""``tandem verify``: prove that a model's architecture is computed correctly here, and print
how.
"""

import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tandem.cli.output import JsonFlag, print_json, print_next, show_work

if TYPE_CHECKING:
    from tandem.models.own.prove import OwnProof
    from tandem.models.proof.result import Proof

__all__ = ["verify"]


def verify(
    model: Annotated[str, typer.Argument(help="Folder, hub id or `demo`; weights are not read.")],
    again: Annotated[bool, typer.Option(help="Prove anew, whatever was found before.")] = False,
    json: JsonFlag = False,
) -> None:
    """Compare our operators, or else transformers' own cache, with transformers' eager code."""
    from tandem.core.errors import ConfigError, UnsupportedError
    from tandem.models.families import open_checkpoint
    from tandem.models.loading.hub import resolve_folder
    from tandem.models.own.gate import open_own
    from tandem.models.own.prove import find_own_proof
    from tandem.models.proof.require import DEFAULT_ROOT, find_proof

    folder, root = resolve_folder(model), None if again else DEFAULT_ROOT
    proof = own = refusal = None
    with show_work(f"comparing a small random model of the architecture of {model}"):
        try:
            proof = find_proof(open_checkpoint(folder), root)
        except (ConfigError, UnsupportedError) as error:
            refusal = error
        if proof is None or not proof.is_proved:
            try:
                own = find_own_proof(open_own(folder), root)
            except (ConfigError, UnsupportedError):
                if refusal is not None:
                    raise refusal from None
    if json:
        told = {} if proof is None else msgspec.to_builtins(proof) | {"is_proved": proof.is_proved}
        if own is not None:
            told["own_modules"] = msgspec.to_builtins(own) | {"is_proved": own.is_proved}
        print_json(told)
    else:
        text = "" if proof is None else render_proof(proof)
        text += "" if refusal is None else f"no operators: {refusal.what}\n"
        sys.stdout.write(text + ("" if own is None else render_own(own)))
    if not any(found is not None and found.is_proved for found in (proof, own)):
        raise typer.Exit(1)
    if not json:
        print_next("tandem", "serve", model)


def render_own(proof: "OwnProof") -> str:
    """Return, as text, how a model that runs by transformers' own modules, with their cache,
    compared with transformers' eager code (its proof).
    """
    outcome = "proved" if proof.is_proved else f"NOT proved: {proof.problem}"
    lines = [f"{proof.model_type} by transformers' own modules, {proof.transformers}: {outcome}"]
    for check in proof.checks:
        mark = "ok" if check.is_ok else "OFF"
        lines.append(f"  {check.name:<24} {mark:<4} {check.excess:.2f} of the bound")
    return "\n".join([*lines, ""])


def render_proof(proof: "Proof") -> str:
    """Return, as text, how our operators compared with transformers' eager code (the proof of a
    model).
    """
    outcome = "proved" if proof.is_proved else f"NOT proved: {proof.problem}"
    lines = [
        f"{proof.architecture or proof.model_type}, transformers {proof.transformers}: {outcome}"
    ]
    for check in proof.checks:
        mark = "ok" if check.is_ok else "OFF"
        lines.append(f"  {check.name:<18} {mark:<4} {check.excess:.2f} of the bound")
    for name in ("noticed", "structural", "refused", "harmless", "unread", "unnoticed"):
        fields = [flip.field for flip in proof.flips if flip.outcome == name]
        if fields:
            lines.append(f"  fields {name}: {', '.join(fields)}")
    kept = [flip for flip in proof.flips if flip.outcome == "kept"]
    lines += [f"  field {flip.field} not changed: it {flip.change}" for flip in kept]
    return "\n".join([*lines, ""])
