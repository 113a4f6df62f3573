"""``tandem list``, ``show`` and ``rm``: the models that were pulled."""

import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from tandem.cli.output import JsonFlag, format_bytes, print_json, print_table

__all__ = ["list_models", "remove", "show"]


def list_models(json: JsonFlag = False) -> None:
    """List the models that were pulled."""
    from tandem.models.loading.kept import list_kept

    kept = list_kept()
    if json:
        print_json([asdict(model) for model in kept])
    elif kept:
        rows = [(m.name, format_bytes(m.size_bytes), m.fetched[:10], m.path) for m in kept]
        print_table(("NAME", "SIZE", "FETCHED", "PLACE"), rows)
    else:
        sys.stdout.write("none: `tandem pull smollm2` fetches a small one\n")


def show(
    model: Annotated[str, typer.Argument(help="Folder, GGUF file, hub id or `demo`.")],
    json: JsonFlag = False,
) -> None:
    """Describe a model by its files."""
    from tandem.models.deferred_imports import defer_imports
    from tandem.models.loading.hub import resolve_folder

    place = resolve_folder(model)
    defer_imports()
    from tandem.models.families import open_checkpoint
    from tandem.models.file_facts import read_file_facts
    from tandem.models.tokenizing.tokenizer import load_tokenizer
    from tandem.server.defaults import load_sampling_defaults

    checkpoint = open_checkpoint(place)
    spec, files = checkpoint.spec, read_file_facts(place)
    facts: dict[str, Any] = {
        "model": model,
        "place": str(place),
        "format": f"{files.form} {files.quantization}".rstrip(),
        "architecture": spec.model_type,
        "layers": spec.num_layers,
        "vocabulary": spec.vocab_size,
        "context": spec.max_position_embeddings,
        "chat template": load_tokenizer(place).chat_template is not None,
        "sampling of chats": load_sampling_defaults(place).chat.list_values(),
    }
    if json:
        print_json(facts)
        return
    for name, value in facts.items():
        shown = value
        if isinstance(value, bool):
            shown = "yes" if value else "none: texts are continued"
        elif isinstance(value, dict):
            shown = ", ".join(f"{key} {v:g}" for key, v in value.items()) or "neutral"
        sys.stdout.write(f"{name:<18} {shown}\n")


def remove(
    model: Annotated[str, typer.Argument(help="A name that `tandem list` lists.")],
    json: JsonFlag = False,
) -> None:
    """Delete a model that was pulled."""
    from tandem.models.loading.kept import remove_kept

    gone = remove_kept(model)
    if json:
        print_json([asdict(each) for each in gone])
    else:
        for each in gone:
            sys.stdout.write(f"deleted {each.name}, {format_bytes(each.size_bytes)}\n")
