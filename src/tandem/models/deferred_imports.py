"""Imports by transformers' modules that are made when one of their names is first used.

What every model of transformers imports serves clusters, compilers and training in its larger part
(``torch.distributed.tensor`` with sympy, ``torch._dynamo``, accelerate, scipy), and no setting of
transformers or torch avoids it. After ``defer_imports`` a name that a module of transformers
imports from ``DEFERRED`` is a stand-in, which imports the module and behaves as the name once it is
called, subclassed or asked for an attribute. Nothing is an instance of a stand-in whose module
was not imported. Python 3.15 has such imports in the language (PEP 810).

Modules that are not of transformers import everything at once, as always.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import operator
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

__all__ = ["DEFERRED", "computing_shapes", "defer_imports"]

DEFERRED = (
    "accelerate",
    "pandas",
    "pyarrow",
    "scipy",
    "sklearn",
    "sympy",
    "torch._dynamo",
    "torch.distributed._composable",
    "torch.distributed._functional_collectives",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
    # These two make objects of ``torch.distributed.tensor`` while they are imported.
    "transformers.distributed.expert_parallel",
    "transformers.distributed.tensor_parallel",
)
"""Modules whose imports are deferred, each with the modules below it."""


def _give_function(*args: Any, **_: Any) -> Any:
    """Return the function that a decorator is applied to, or a decorator that returns it."""
    return next(filter(callable, args), lambda function: function)


PLAIN: dict[str, dict[str, Callable[..., Any]]] = {
    # What they mark is for torch's compiler, and this process compiles nothing.
    "torch._dynamo": dict.fromkeys(
        ("allow_in_graph", "assume_constant_result", "disable"), _give_function
    ),
    # Without the compiler, sizes are numbers, and conditions on them are true or false.
    "torch.fx.experimental.symbolic_shapes": {
        **dict.fromkeys(
            (
                "expect_true",
                "guard_bool",
                "guard_or_false",
                "guard_or_true",
                "guard_size_oblivious",
                "statically_known_true",
            ),
            lambda condition, **_: bool(condition),
        ),
        "is_nested_int": lambda _: False,
        "sym_and": lambda *conditions: all(conditions),
        "sym_eq": operator.eq,
        "sym_or": lambda *conditions: any(conditions),
    },
}
"""Functions, by module, that stand-ins carry out themselves as long as nobody imports the module:
torch calls them in the definitions of classes and for each operation on the meta device.
"""


def defer_imports() -> None:
    """Defer imports of ``DEFERRED`` by transformers' modules, in this process from now on.

    Idempotent. It adds to the import system of the process and is therefore for processes of our
    own, not for a program that uses ``tandem`` as a library.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds transformers' modules and, while one of them is executed, deferred modules."""

    def __init__(self) -> None:
        self._depth = 0
        """Number of transformers' modules that are being executed, one within the other."""
        self._stand_ins: list[_StandInModule] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a stand-in or of a module of transformers; None for others."""
        if self._depth and _is_deferred(fullname):
            loader = _StandInLoader(self)
            return importlib.machinery.ModuleSpec(fullname, loader, is_package=True)
        if fullname.partition(".")[0] != "transformers":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _DeferringLoader(spec.loader.name, spec.loader.path, self)
        return spec

    def add(self, module: "_StandInModule") -> None:
        """Take in a stand-in that is now in ``sys.modules``."""
        self._stand_ins.append(module)

    @contextlib.contextmanager
    def deferring(self) -> Generator[None]:
        """Defer imports in this context."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._remove()

    @contextlib.contextmanager
    def importing(self) -> Generator[None]:
        """Import everything at once in this context, also within ``deferring``."""
        depth, self._depth = self._depth, 0
        self._remove()
        try:
            yield
        finally:
            self._depth = depth

    def _remove(self) -> None:
        """Take the stand-ins from the import system, so that others import the modules."""
        for module in self._stand_ins:
            name = module.__name__
            if sys.modules.get(name) is module:
                del sys.modules[name]
            parent, _, last = name.rpartition(".")
            if parent in sys.modules and vars(sys.modules[parent]).get(last) is module:
                delattr(sys.modules[parent], last)
        self._stand_ins.clear()


@contextlib.contextmanager
def computing_shapes() -> Generator[None]:
    """Defer in this context also imports that torch makes for operations on the meta device.

    Does nothing in a process without ``defer_imports``.
    """
    with contextlib.ExitStack() as opened:
        for finder in sys.meta_path:
            if isinstance(finder, _Finder):
                opened.enter_context(finder.deferring())
        yield


def _is_deferred(name: str) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in DEFERRED)


class _DeferringLoader(importlib.machinery.SourceFileLoader):
    """Executes a module of transformers, deferring what it imports."""

    def __init__(self, fullname: str, path: str, finder: _Finder) -> None:
        super().__init__(fullname, path)
        self._finder = finder

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module."""
        with self._finder.deferring():
            super().exec_module(module)


class _StandInLoader(importlib.abc.Loader):
    """Makes stand-ins of modules."""

    def __init__(self, finder: _Finder) -> None:
        self._finder = finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return a new stand-in."""
        return _StandInModule(spec.name, self._finder)

    def exec_module(self, module: ModuleType) -> None:
        """Execute nothing: the names of a stand-in are made when they are asked for."""
        assert isinstance(module, _StandInModule)
        self._finder.add(module)


class _StandInModule(ModuleType):
    """A module that is not imported, all of whose names are stand-ins."""

    def __init__(self, name: str, finder: _Finder) -> None:
        super().__init__(name)
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} is not imported: no {name!r} yet")
        source = _Source(self._finder, self.__name__, name)
        return _StandIn(name, (), {"_source": source})


class _Source(NamedTuple):
    """The module and the name that a stand-in stands for."""

    finder: _Finder
    module: str
    name: str

    @property
    def is_imported(self) -> bool:
        found = sys.modules.get(self.module)
        return found is not None and not isinstance(found, _StandInModule)


class _StandIn(type):
    """The type of stand-ins, which are classes, so that annotations and ``isinstance`` take them.

    A class derived from a stand-in is derived from what it stands for.
    """

    def __new__(
        cls, name: str, bases: tuple[type, ...], members: dict[str, Any], **options: Any
    ) -> Any:
        if not bases:
            return super().__new__(cls, name, bases, members)
        real = tuple(_import(base) if type(base) is _StandIn else base for base in bases)
        return type(real[0])(name, real, members, **options)

    def __call__(cls, *args: Any, **options: Any) -> Any:
        source = _get_source(cls)
        plain = PLAIN.get(source.module, {}).get(source.name)
        if plain is not None and not source.is_imported:
            return plain(*args, **options)
        return _import(cls)(*args, **options)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{cls.__name__} is not imported: no {name!r} yet")
        return getattr(_import(cls), name)

    def __instancecheck__(cls, instance: Any) -> bool:
        return _get_source(cls).is_imported and isinstance(instance, _import(cls))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return _get_source(cls).is_imported and issubclass(subclass, _import(cls))

    def __contains__(cls, item: Any) -> bool:
        return item in _import(cls)

    def __getitem__(cls, item: Any) -> Any:
        return _import(cls)[item]

    def __iter__(cls) -> Iterator[Any]:
        return iter(_import(cls))

    def __len__(cls) -> int:
        return len(_import(cls))


def _get_source(stand_in: type) -> _Source:
    return vars(stand_in)["_source"]


def _import(stand_in: type) -> Any:
    """Return what a stand-in stands for; imports its module."""
    source = _get_source(stand_in)
    with source.finder.importing():
        return getattr(importlib.import_module(source.module), source.name)
