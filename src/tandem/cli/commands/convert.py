"""``tandem convert``: pack a model's experts ahead, or write its weights in another format."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

from tandem.cli.output import JsonFlag, make_bars, print_json, print_next

__all__ = ["convert"]

MIB = 1 << 20
QUANT_METHODS = {"int4": "int4", "moe_int4": "int4", "int8": "int8", "moe_int8": "int8"}
"""Weight format by name of KTransformers' quantization method."""


def convert(
    model: Annotated[str, typer.Argument(help="Folder, hub id or `demo`.")] = "",
    weight_format: Annotated[
        str, typer.Option("--format", help="Pack routed experts: int8, int4, bf16, ...")
    ] = "",
    to: Annotated[
        str,
        typer.Option(
            help="Write a checkpoint: bf16, fp8, int4g32, ..., or GGUF: q4_k_m, q6_k, ..."
        ),
    ] = "",
    out: Annotated[Path | None, typer.Option(help="With --to: the folder to make.")] = None,
    packed_cache: Annotated[
        str, typer.Option(help="Folder to keep them in; auto is under ~/.cache/tandem.")
    ] = "auto",
    rules: Annotated[Path | None, typer.Option(help="YAML rule file; may name formats.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read everything again and compare checksums.")
    ] = False,
    input_path: Annotated[str, typer.Option("--input-path", "-i", hidden=True)] = "",
    input_type: Annotated[str, typer.Option(hidden=True)] = "",
    output: Annotated[str, typer.Option("--output", "-o", hidden=True)] = "",
    quant_method: Annotated[str, typer.Option(hidden=True)] = "",
    cpuinfer_threads: Annotated[int, typer.Option(hidden=True)] = 0,
    threadpool_count: Annotated[int, typer.Option(hidden=True)] = 0,
    resume_layer: Annotated[int, typer.Option(hidden=True)] = 0,
    no_merge_safetensor: Annotated[bool, typer.Option(hidden=True)] = False,
    gpu: Annotated[bool, typer.Option(hidden=True)] = False,
    json: JsonFlag = False,
) -> None:
    """Pack routed experts for the CPU (--format), or write a checkpoint in another format (--to).

    `tandem serve MODEL --model.expert-format FORMAT` packs the same while it loads. An interrupted
    run of --format goes on where it was; a changed model, format or layout is packed anew. --to
    writes safetensors that load again, here and elsewhere, or a GGUF file in one of llama.cpp's
    mixtures (q4_0 to q8_0, q2_k to q6_k, iq4_nl, iq4_xs); interrupted, it leaves nothing behind
    under the name of --out.

    The line of KTransformers' convert_cpu_weights.py is taken too: --input-path is MODEL,
    --quant-method the format, --output the packed cache.
    """
    from tandem.models.gguf.mixtures import MIXTURES
    from tandem.models.loading.hub import resolve_folder

    # These options of kt-kernel's converter have no effect here: types, devices and threads are
    # chosen automatically, layouts fit any number of NUMA nodes, files are never merged, and
    # finished ones are not made again.
    del input_type, cpuinfer_threads, threadpool_count, resume_layer, no_merge_safetensor, gpu
    if input_path:
        if model or weight_format or to:
            raise typer.BadParameter("--input-path is MODEL, --quant-method is --format: once each")
        model, weight_format = input_path, _read_method(quant_method or "int4")
        packed_cache = output or packed_cache
    elif quant_method or output:
        raise typer.BadParameter("--quant-method and --output go with --input-path")
    if not model:
        raise typer.BadParameter("give a model", param_hint="'MODEL'")
    if bool(weight_format) == bool(to):
        raise typer.BadParameter("give --format or --to")
    if to and out is None:
        raise typer.BadParameter(f"--to {to} writes a folder: give --out FOLDER")
    if out is not None and not to:
        raise typer.BadParameter("--out goes with --to FORMAT")
    if weight_format.lower() in MIXTURES:
        what = f"--format packs experts for `tandem serve`: a GGUF file is --to {weight_format}"
        raise typer.BadParameter(f"{what} --out FOLDER")
    if to and (verify or rules is not None or packed_cache != "auto"):
        raise typer.BadParameter("--verify, --rules and --packed-cache go with --format, not --to")
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    with make_bars(*columns, TimeRemainingColumn(), is_off=json) as bars:
        task = bars.add_task(model, total=None)

        def show(done: int, total: int, what: str) -> None:
            bars.update(task, completed=done, total=total or None, description=what)

        if out is not None:
            from tandem.models.export import export_checkpoint
            from tandem.models.gguf_export import export_gguf

            to = to.lower()
            export = export_gguf if to in MIXTURES else export_checkpoint
            exported = export(resolve_folder(model), to, out, progress=show)
            text = (
                f"{exported.folder}: {exported.num_coded} matrices in {exported.weight_format}, "
                f"{exported.num_tensors} tensors, {exported.size_bytes / MIB:.0f} MiB "
                f"({exported.source_bytes / MIB:.0f} MiB before)\n"
            ) + (exported.note and f"note: {exported.note}\n")
            fields = asdict(exported)
            following = [str(exported.folder)]
        else:
            from tandem.models.convert import convert_model

            packed = convert_model(
                resolve_folder(model),
                weight_format,
                packed_cache=packed_cache,
                rules=rules,
                is_verified=verify,
                progress=show,
            )
            text = (
                f"{packed.folder}: {packed.num_files} files in {packed.weight_format}, "
                f"{packed.size_bytes / MIB:.0f} MiB ({packed.source_bytes / MIB:.0f} MiB before); "
                f"{packed.num_packed} packed now, {packed.num_files - packed.num_packed} were "
                "there\n"
            )
            fields = asdict(packed)
            following = [model]
            if weight_format:
                following += ["--model.expert-format", weight_format]
            if rules is not None:
                following += ["--model.rules", str(rules)]
            if packed_cache != "auto":
                following += ["--model.packed-cache", packed_cache]
    if json:
        print_json(fields)
    else:
        sys.stdout.write(text)
        print_next("tandem", "serve", *following)


def _read_method(method: str) -> str:
    if method not in QUANT_METHODS:
        known = ", ".join(QUANT_METHODS)
        raise typer.BadParameter(f"--quant-method {method}: known are {known}")
    return QUANT_METHODS[method]
