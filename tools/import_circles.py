"""Circles of imports between files of the package: there are to be none.

An import at the top of a module counts, also one for the type checker alone; one inside of a
function does not. Importing ``a.b.c`` imports ``a.b`` as well, unless the importer is in ``a.b``
itself, whose ``__init__`` has begun by then.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parent.parent / "src"


def find_modules(root: Path) -> dict[str, Path]:
    """Return the files of all packages below a folder, by the names of their modules."""
    modules: dict[str, Path] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def find_statements(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that run, or are checked, with the module itself."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            for branch in ("body", "orelse", "finalbody"):
                yield from find_statements(getattr(node, branch, []))
            for handler in getattr(node, "handlers", []):
                yield from find_statements(handler.body)


DEFINITION = re.compile(r"^(?:@|def |async def |class )", re.MULTILINE)
IMPORT = re.compile(r"^\s*(?:from|import)\s", re.MULTILINE)


def parse_imports(text: str) -> ast.Module:
    """Return the tree of a module, or of its part that imports: most code stands behind that."""
    first = DEFINITION.search(text)
    if first is not None and not IMPORT.search(text, first.start()):
        try:
            return ast.parse(text[: first.start()])
        except SyntaxError:  # It was a line of a string.
            pass
    return ast.parse(text)


def find_imports(name: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """Return the modules that one imports."""
    imported: set[str] = set()
    for node in find_statements(parse_imports(path.read_text()).body):
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        else:
            home = node.module or ""
            members = [f"{home}.{alias.name}" for alias in node.names]
            wanted = [m if m in modules else home for m in members]
        for module in wanted:
            parts = module.split(".")
            chain = (".".join(parts[: i + 1]) for i in range(len(parts)))
            imported |= {
                one
                for one in chain
                if one in modules and (one == module or not f"{name}.".startswith(f"{one}."))
            }
    return imported - {name}


def find_circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that reach each other, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = lowest[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], index[other])
        if lowest[name] == index[name]:
            circle: list[str] = []
            while not circle or circle[-1] != name:
                circle.append(stack.pop())
            if len(circle) > 1:
                circles.append(sorted(circle))

    for name in graph:
        if name not in index:
            visit(name)
    return circles


def main(root: Path = SOURCES) -> int:
    """Print each circle; return how many there are."""
    modules = find_modules(root)
    graph = {name: find_imports(name, path, modules) for name, path in modules.items()}
    circles = list(find_circles(graph))
    for circle in circles:
        inside = set(circle)
        sys.stdout.write(f"import circle of {len(circle)} files:\n")
        for name in circle:
            sys.stdout.write(f"  {name} -> {', '.join(sorted(graph[name] & inside))}\n")
    return len(circles)


if __name__ == "__main__":
    sys.exit(main())
