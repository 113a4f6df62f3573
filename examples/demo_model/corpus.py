"""The corpus: the Python standard library that is already on this machine.

Owns the choice of files, the split, and the mechanical "chat" documents made from functions with
docstrings. Knows nothing of tokens. The split depends only on each file's relative path, so a file
is held out on every machine and Python version, or on none. Pure functions, no threads.
"""

import ast
import hashlib
import random
import sysconfig
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_PERCENT = 3
# Tables, foreign-language fixtures and machine-made files: text, but nothing one would continue.
EXCLUDED_PREFIXES = (
    "site-packages/",
    "dist-packages/",
    "encodings/",
    "pydoc_data/",
    "lib2to3/tests/data/",
    "config-",
    "_sysconfigdata",
    "test/encoded_modules/",
    "test/cjkencodings/",
    "test/test_email/",
    "test/bad",
    "test/test_unicode",
    "test/test_codec",
    "test/test_multibytecodec",
    "test/decimaltestdata/",
)
MIN_FILE_CHARACTERS = 200
MAX_DIGIT_SHARE = 0.12
MAX_NON_ASCII_SHARE = 0.02
CHAT_SYSTEM = ("You are a helpful assistant.", "You are a Python programmer.", "Answer with code.")


@dataclass(frozen=True)
class SourceFile:
    """One source file: its path inside the library, its text, and which side it is on."""

    path: str
    text: str
    is_held_out: bool
    is_test: bool


def read_corpus(max_file_bytes: int, root: Path | None = None) -> list[SourceFile]:
    """Read every usable `.py` file below `root` (this Python's standard library), sorted by path.

    Files that are not UTF-8, that are mostly data, that repeat another file or that are longer than
    `max_file_bytes` are left out.
    """
    if root is None:
        root = Path(sysconfig.get_paths()["stdlib"])
    files: list[SourceFile] = []
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        if name.startswith(EXCLUDED_PREFIXES) or path.stat().st_size > max_file_bytes:
            continue
        try:
            text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        digest = hashlib.sha256(text.strip().encode()).hexdigest()
        if digest in seen or not is_code(text):
            continue
        seen.add(digest)
        is_test = name.startswith("test/") or "/test/" in name or "/tests/" in name
        is_test = is_test or "/idle_test/" in name
        files.append(SourceFile(name, text, is_held_out(name), is_test))
    return files


def is_code(text: str) -> bool:
    """Say whether a file is worth learning: not empty, and not a table."""
    size = len(text)
    if size < MIN_FILE_CHARACTERS:
        return False
    num_digits = sum(text.count(digit) for digit in "0123456789")
    num_foreign = size - len(text.encode("ascii", "ignore"))
    return num_digits <= MAX_DIGIT_SHARE * size and num_foreign <= MAX_NON_ASCII_SHARE * size


def is_held_out(name: str) -> bool:
    """Decide a file's side from its relative path alone."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def hash_corpus(files: list[SourceFile]) -> str:
    """SHA-256 over paths and texts, in order: the identity of a corpus."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.path.encode() + b"\0" + file.text.encode() + b"\0")
    return digest.hexdigest()


@dataclass(frozen=True)
class Function:
    """A function with a docstring, dedented; `signature` is `name(args)`."""

    signature: str
    summary: str
    source: str


def parse_source(text: str) -> ast.Module:
    """Return the syntax tree of a file; an empty one if it is not Python of this version."""
    try:
        with warnings.catch_warnings():
            # Some files hold invalid escapes; a warning for each says nothing about this recipe.
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def extract_functions(text: str) -> list[Function]:
    """Find the functions of a file that have a docstring and are 4 to 40 lines long."""
    lines = text.splitlines()
    found = []
    for node in ast.walk(parse_source(text)):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        doc = ast.get_docstring(node)
        if not doc or not 4 <= node.end_lineno - node.lineno + 1 <= 40:
            continue
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        summary = " ".join(doc.strip().split("\n\n")[0].split())
        if source.startswith("def ") and 10 <= len(summary) <= 200:
            args = ", ".join(arg.arg for arg in node.args.args if arg.arg not in ("self", "cls"))
            found.append(Function(f"{node.name}({args})", summary, source.rstrip() + "\n"))
    return found


def build_chats(files: list[SourceFile], rng: random.Random) -> list[list[dict[str, str]]]:
    """Turn functions into conversations: a request, and the function or its rest as the answer."""
    turns = [
        _make_turn(function, rng) for file in files for function in extract_functions(file.text)
    ]
    rng.shuffle(turns)
    chats = []
    while turns:
        num_turns = min(len(turns), 1 if rng.random() < 0.85 else 2)
        messages = []
        if rng.random() < 0.2:
            messages.append({"role": "system", "content": rng.choice(CHAT_SYSTEM)})
        for _ in range(num_turns):
            request, answer = turns.pop()
            messages.append({"role": "user", "content": request})
            messages.append({"role": "assistant", "content": answer})
        chats.append(messages)
    return chats


def _make_turn(function: Function, rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.5:
        lines = function.source.splitlines(keepends=True)
        cut = rng.randrange(1, len(lines))
        lead = rng.choice(("Continue this code:", "Complete this function:", "Continue:"))
        return f"{lead}\n" + "".join(lines[:cut]), "".join(lines[cut:])
    name = function.signature if rng.random() < 0.6 else function.signature.split("(")[0]
    summary = function.summary.rstrip(".")
    request = rng.choice(
        (
            f"Write a function {name}: {summary}.",
            f"Write a Python function {name} that does this: {summary}.",
            f"Write a function {name} that {summary[0].lower()}{summary[1:]}.",
            f"Write {name}. {summary}.",
        )
    )
    return request, function.source
