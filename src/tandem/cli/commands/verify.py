"""``tandem verify``: prove that a model's architecture runs right here, and print how."""

import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tandem.cli.output import JsonFlag, print_json

if TYPE_CHECKING:
    from tandem.models.proof.result import Proof

__all__ = ["verify"]


def verify(
    model: Annotated[str, typer.Argument(help="Folder, hub id or `demo`; weights are not read.")],
    again: Annotated[bool, typer.Option(help="Prove anew, whatever was found before.")] = False,
    json: JsonFlag = False,
) -> None:
    """Compare our operators with transformers' on a tiny random model of a configuration."""
    from tandem.models.families import open_checkpoint
    from tandem.models.loading.hub import resolve_folder
    from tandem.models.proof.require import DEFAULT_ROOT, find_proof

    checkpoint = open_checkpoint(resolve_folder(model))
    proof = find_proof(checkpoint, None if again else DEFAULT_ROOT)
    if json:
        print_json(msgspec.to_builtins(proof) | {"is_proved": proof.is_proved})
    else:
        sys.stdout.write(render_proof(proof))
    if not proof.is_proved:
        raise typer.Exit(1)


def render_proof(proof: "Proof") -> str:
    """Return a proof as text for people."""
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
