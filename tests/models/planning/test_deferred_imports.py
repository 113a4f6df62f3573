"""Goal: what transformers imports and serving does not use is imported when it is used, and no
other program notices.

Method: packages of these names, made here, in a process of their own.
"""

import subprocess
import sys

import pytest

TRANSFORMERS = """
from scipy import Solver, solve
from scipy.sub import answer
from scipy import TABLE
import torch._dynamo

@torch._dynamo.allow_in_graph
def marked(x: Solver | None) -> int:
    return 7

@torch._dynamo.disable(recursive=False)
def unmarked():
    return 8

def solve_late():
    import scipy
    return scipy.solve()
"""
SCIPY = """
class Solver:
    kind = "real"
    def __init__(self, number=1):
        self.number = number
def solve():
    return 42
TABLE = {"a": 1}
"""

BEGIN = """
import sys
from tandem.models.deferred_imports import computing_shapes, defer_imports
defer_imports()
import transformers
assert "scipy" not in sys.modules and "scipy.sub" not in sys.modules, "imported at once"
assert "torch._dynamo" not in sys.modules and not hasattr(sys.modules["torch"], "_dynamo")
"""

CASES = {
    "a function is called": "assert transformers.solve() == 42",
    "a module below is used": "assert transformers.answer() == 43",
    "a class is called": "assert transformers.Solver(3).number == 3",
    "an attribute is read": "assert transformers.Solver.kind == 'real'",
    "a table is read": """
assert transformers.TABLE["a"] == 1 and "a" in transformers.TABLE
assert list(transformers.TABLE) == ["a"] and len(transformers.TABLE) == 1
""",
    "a class is derived": """
class Mine(transformers.Solver):
    pass
import scipy
assert issubclass(Mine, scipy.Solver) and Mine(5).number == 5
""",
    "a function imports it itself": """
assert transformers.solve_late() == 42
import scipy
assert type(scipy).__name__ == "module"
""",
    "another program imports it": """
import scipy
mine = scipy.Solver()
assert isinstance(mine, transformers.Solver)
assert issubclass(scipy.Solver, transformers.Solver)
""",
}

UNUSED = """
assert not isinstance(3, transformers.Solver) and not issubclass(int, transformers.Solver)
assert transformers.marked(None) == 7 and transformers.unmarked() == 8
with computing_shapes():
    from torch.fx.experimental.symbolic_shapes import guard_or_false, is_nested_int, sym_and, sym_eq
    assert guard_or_false(1 == 1) and not is_nested_int(3)
    assert sym_and(True, sym_eq((1, 2), (1, 2))) and not sym_eq(1, 2)
names = ("scipy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes")
assert not any(name in sys.modules for name in names), "imported though nothing needs it"
"""


@pytest.fixture
def packages(tmp_path):
    """A folder with packages of the names that matter."""
    files = {
        "transformers/__init__.py": TRANSFORMERS,
        "scipy/__init__.py": SCIPY,
        "scipy/sub.py": "def answer():\n    return 43\n",
        "torch/__init__.py": "",
        "torch/_dynamo.py": "raise ImportError('the compiler is imported')",
        "torch/fx/__init__.py": "",
        "torch/fx/experimental/__init__.py": "",
        "torch/fx/experimental/symbolic_shapes.py": "raise ImportError('sympy is imported')",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_deferred_import_is_made_when_it_is_used(packages):
    """Each case in a child of one process, since an import cannot be undone."""
    code = [
        "import os",
        f"sys_path = {str(packages)!r}",
        "import sys",
        "sys.path.insert(0, sys_path)",
    ]
    code.append(BEGIN)
    code.append("def run(name, text):\n    exec(text, globals())\n    print(name)")
    for name, text in {"nothing is used": UNUSED, **CASES}.items():
        code.append(f"child = os.fork()\nif not child:\n    run({name!r}, {text!r})")
        code.append("    sys.stdout.flush()\n    os._exit(0)\nos.waitpid(child, 0)")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == ["nothing is used", *CASES], done.stderr
