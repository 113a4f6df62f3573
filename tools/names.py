"""File names and dotted names in pages and docstrings that do not exist, and words of two meanings.

Looked at: what stands in backticks in every Markdown page and every docstring, and names that begin
with the package's. A file name must be the end of a path in the tree; a dotted name that begins
with the package or a folder of it must be a module, a member of one, or a setting. Nothing is
imported: sources are read as syntax.
The tables "Words in names" and "Words that names do not have" of the glossary are rules: a class
whose name has such a word stands in its row, other names have the word only in the folders of the
row, and the words of the second table stand in no name.
The changelog and the records of ``benchmarks/`` speak of their own day and are not looked at.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "tandem"
SKIPPED = ("CHANGELOG.md", "benchmarks/", "examples/demo_model/")
"""Pages that speak of what was, and of where a model's text comes from."""

GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
SPAN = re.compile(r"(?P<ticks>`+)(?P<name>[^`\n]+)(?P=ticks)|\b(?P<bare>tandem(?:\.[A-Za-z_]\w*)+)")
FILE = re.compile(r"[\w./-]*\w\.(?:py|pyi|md|cc|h|toml|cmake)")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
FOREIGN = frozenset({"setup.py", "modeling.py", "conftest.py", "prompt.md"})
"""Files of others, or of no particular place."""


def list_files() -> list[str]:
    """Return the paths of all files of the tree, also of those that are not committed yet."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    return [path for path in listed if (ROOT / path).is_file()]


def find_docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each string that stands alone: of modules, names and attributes."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value


def find_texts(path: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of what a file says to its readers."""
    text = (ROOT / path).read_text(errors="replace")  # Some are broken on purpose.
    if path.endswith(".md"):
        yield 1, text
    elif path.endswith(".py"):
        yield from find_docstrings(ast.parse(text))


def find_members(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Return the names that statements bind, with the statement of each."""
    members: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            members[node.name] = node
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                members |= {
                    target.attr: node
                    for target in ast.walk(node)
                    if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
                }
        elif isinstance(node, ast.Import | ast.ImportFrom):
            members |= {(name.asname or name.name).split(".")[0]: node for name in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                members |= {n.id: node for n in ast.walk(target) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.If | ast.Try):
            members |= find_members([*node.body, *node.orelse])
    return members


@cache
def read_members(module: Path) -> dict[str, ast.stmt]:
    """Return the members of a module, read as syntax."""
    return find_members(ast.parse(module.read_text()).body)


@cache
def read_native() -> frozenset[str]:
    """Return the names that the extension gives."""
    stubs = [path.read_text() for path in PACKAGE.glob("_native/*.py*") if path.is_file()]
    return frozenset(re.findall(r"\w+", "".join(stubs)))


def has_member(module: Path, names: list[str]) -> bool:
    """Return True if a module binds ``names[0]``, and its class ``names[1]``; no deeper look."""
    if module.is_relative_to(PACKAGE / "_native"):
        return names[0] in read_native()
    members = read_members(module)
    if names[0] not in members:
        return False
    home = members[names[0]]
    if len(names) == 1 or not isinstance(home, ast.ClassDef):
        return True  # What is imported is looked at where it is made.
    return bool(home.bases) or names[1] in find_members(home.body)


def is_setting(folder: Path, name: str) -> bool:
    """Return True if a class of the folder's ``config.py`` has a field of that name."""
    config = folder / "config.py"
    classes = read_members(config).values() if config.exists() else ()
    return any(isinstance(c, ast.ClassDef) and name in find_members(c.body) for c in classes)


def exists(names: list[str]) -> bool:
    """Return True if a dotted name below the package means something."""
    folder = PACKAGE
    for i, name in enumerate(names):
        if (folder / name).is_dir():
            folder /= name
            continue
        if (folder / f"{name}.py").exists():
            module = folder / f"{name}.py"
            rest = names[i + 1 :]
            return not rest or has_member(module, rest) or is_setting(folder, rest[0])
        # A group of settings may be called like a folder below that of their class.
        homes = (folder, folder.parent) if i else (folder,)
        return has_member(folder / "__init__.py", names[i:]) or any(
            is_setting(home, name) for home in homes
        )
    return True


def find_untrue(text: str, page: str, files: list[str]) -> Iterator[tuple[int, str]]:
    """Yield (line offset, name) of each name in backticks that does not exist."""
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    for match in SPAN.finditer(text):
        said = (match["name"] or match["bare"]).strip()
        line = text.count("\n", 0, match.start())
        if FILE.fullmatch(said):
            name = said.removeprefix("./")
            beside = (ROOT / page).parent / name
            known = any(path == name or path.endswith("/" + name) for path in files)
            if not known and not beside.exists() and name not in FOREIGN:
                yield line, said
        elif DOTTED.fullmatch(said):
            names = said.split(".")
            if names[0] == "tandem":
                names = names[1:]
            elif names[0] not in folders:
                continue
            if not exists(names):
                yield line, said


def read_table(title: str) -> dict[str, list[str]]:
    """Return the rows of a table of the glossary: by word, its other cells."""
    _, _, rest = GLOSSARY.read_text().partition(f"## {title}\n")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in rest.partition("\n## ")[0].splitlines()
        if line.startswith("|")
    ]
    return {word: cells for word, *cells in rows[2:]}


def split_words(name: str) -> set[str]:
    """Return the words of a name in CamelCase or with underscores, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def find_bound(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, name, True if it is a class's) of each name that a module binds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name, isinstance(node, ast.ClassDef)
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg, False
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr if isinstance(node, ast.Attribute) else node.id, False


def find_ambiguous(sources: dict[str, str]) -> Iterator[str]:
    """Yield what the glossary refuses in sources, given by their path in the package."""
    meanings, barred = read_table("Words in names"), read_table("Words that names do not have")
    classes = {word: set(re.findall(r"\w+", cells[1])) for word, cells in meanings.items()}
    homes = {word: tuple(cells[2].split()) for word, cells in meanings.items()}
    seen: set[str] = set()
    for path, text in sources.items():
        for line, name, is_class in find_bound(ast.parse(text)):
            seen.add(name)
            words = split_words(name)
            for word in words & barred.keys():
                yield f"{path}:{line}: {name}: say {barred[word][0]}, not {word}"
            for word in words & meanings.keys():
                if is_class and name not in classes[word]:
                    yield f"{path}:{line}: class {name} is not in the glossary's row of {word}"
                elif homes[word] and not path.startswith(homes[word]):
                    yield f"{path}:{line}: {name}: {word} has another meaning in the glossary"
    for word, listed in classes.items():
        for name in sorted(listed - seen):
            yield f"{GLOSSARY.name}: {name}, in the row of {word}, does not exist"


def main() -> int:
    """Print each untrue name with its place; return 1 if there is one."""
    files = list_files()
    found = 0
    for path in files:
        if path.startswith(SKIPPED):
            continue
        for begin, text in find_texts(path):
            for offset, name in find_untrue(text, path, files):
                sys.stdout.write(f"{path}:{begin + offset}: `{name}` does not exist\n")
                found += 1
    sources = {str(p.relative_to(PACKAGE)): p.read_text() for p in sorted(PACKAGE.rglob("*.py"))}
    for problem in find_ambiguous(sources):
        sys.stdout.write(f"{problem}\n")
        found += 1
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
