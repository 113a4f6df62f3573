"""Make the demo's dataset: what a function does, from the standard library's docstrings.

A row asks about a function whose docstring is taken out and answers with the docstring's first
sentence. Held-out rows come from files that neither the demo model (``examples/demo_model``) nor
the adapter has read: a hash of the file's path decides, so on every machine the same ones.

    python examples/finetune_demo/make_dataset.py --out FOLDER
"""

import argparse
import ast
import json
import random
import re
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "demo_model"))

from corpus import SourceFile, parse_source, read_corpus

QUESTION = "What does this function do?"
MAX_FILE_BYTES = 1 << 20
MAX_CODE_LINES = 12
"""Of a function shown in a question; the rest is cut off."""
MIN_WORDS, MAX_WORDS = 3, 20
"""Of an answer."""


def main() -> int:
    """Write the rows of both sides and their descriptions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--max-train", type=int, default=2000, help="training rows at most")
    parser.add_argument("--max-held-out", type=int, default=60, help="held-out rows at most")
    options = parser.parse_args()
    files = [file for file in read_corpus(MAX_FILE_BYTES) if not file.is_test]
    train, held_out = split_rows(files, options.max_train, options.max_held_out)
    write_dataset(options.out, train, held_out)
    print(f"{options.out}: {len(train)} rows to learn, {len(held_out)} held out")
    return 0


def write_dataset(folder: Path, train: list[dict], held_out: list[dict]) -> None:
    """Write both files and the `dataset_info.json` that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    info = {}
    for name, rows in (("docstrings", train), ("docstrings_held_out", held_out)):
        (folder / f"{name}.json").write_text(json.dumps(rows, indent=1), "utf-8")
        info[name] = {"file_name": f"{name}.json"}
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=1), "utf-8")


def split_rows(
    files: list[SourceFile], max_train: int, max_held_out: int
) -> tuple[list[dict], list[dict]]:
    """Return (rows to learn, held-out rows), shuffled; no answer is on both sides."""
    sides: dict[bool, list[dict]] = {False: [], True: []}
    for file in files:
        sides[file.is_held_out] += make_rows(file.text)
    rng = random.Random(1)
    for rows in sides.values():
        rng.shuffle(rows)
    held_out = sides[True][:max_held_out]
    answers = {row["output"] for row in held_out}
    train = [row for row in sides[False] if row["output"] not in answers]
    return train[:max_train], held_out


def make_rows(text: str) -> list[dict]:
    """Return a row for each function of a file whose docstring begins with a short sentence."""
    lines = text.splitlines()
    rows = []
    for node in ast.walk(parse_source(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
            continue
        answer = find_sentence(ast.get_docstring(node) or "")
        if answer is None:
            continue
        doc = node.body[0]
        kept = lines[node.lineno - 1 : doc.lineno - 1] + lines[doc.end_lineno : node.end_lineno]
        code = textwrap.dedent("\n".join(line for line in kept if line.strip()))
        if not code.isascii() or '"""' in code:
            continue
        shown = "\n".join(code.splitlines()[:MAX_CODE_LINES])
        rows.append({"instruction": QUESTION, "input": shown, "output": answer})
    return rows


def find_sentence(doc: str) -> str | None:
    """Return the first sentence of a docstring, with its full stop, if it is one to learn."""
    paragraph = " ".join(doc.strip().split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?])\s", paragraph)[0].rstrip(".!? ")
    is_prose = sentence[:1].isupper() and sentence.isascii() and "->" not in sentence
    if not is_prose or not MIN_WORDS <= len(sentence.split()) <= MAX_WORDS:
        return None
    return sentence + "."


if __name__ == "__main__":
    sys.exit(main())
