"""Importing what an engine needs, which is nearly all of an instance's start.

Half of what transformers imports with its first model serves clusters, compilers and the losses of
training: ``torch.distributed.tensor``, ``torch._dynamo`` and scipy. An instance uses none of them.
While transformers is imported, its own questions whether they are there are answered with no, and
``torch._dynamo``, which it takes for granted, is a stand-in whose decorators return what they
decorate. Afterwards everything is as it was: who imports ``torch._dynamo`` then gets the real one.
"""

import contextlib
import gc
import importlib
import logging
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["import_libraries"]

logger = logging.getLogger(__name__)

LIBRARIES = (
    "tandem.engine.build",
    "tandem.engine.disaggregation.exchange",
    "tandem.engine.tiers.service",
)
"""Ours that an engine imports, whatever its model and settings."""
TRANSFORMERS = (
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.modeling_layers",
    "transformers.models.auto.modeling_auto",
)
"""What every model's module imports."""
UNUSED = ("is_scipy_available", "is_torch_distributed_available")
"""Questions of transformers' that are answered with no."""
COMPILER = "torch._dynamo"


def import_libraries() -> None:
    """Import what does not depend on the settings: nearly all of a start. Nothing if that is done.

    Without the garbage collector, which spends a sixth of the time on objects that stay for good,
    and never looks at them later.
    """
    gc.disable()
    for name in LIBRARIES:
        importlib.import_module(name)
    _import_transformers()
    gc.freeze()
    gc.enable()


def _import_transformers() -> None:
    if COMPILER not in sys.modules and TRANSFORMERS[0] not in sys.modules:
        try:
            with _stand_in_compiler(), _answer_questions():
                for name in TRANSFORMERS:
                    importlib.import_module(name)
        except (ImportError, AttributeError, TypeError) as error:
            # A version that uses more of them: the start takes longer, that is all.
            logger.info("event=lean_import_failed error=%r", error)
    for name in TRANSFORMERS:
        importlib.import_module(name)


class _Compiler(ModuleType):
    """``torch._dynamo`` without the compiler; its submodules are the real ones."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _decorate


def _decorate(function: Any = None, *_: Any, **__: Any) -> Any:
    return (lambda decorated: decorated) if function is None else function


@contextlib.contextmanager
def _stand_in_compiler() -> Iterator[None]:
    import torch

    spec = find_spec(COMPILER)
    assert spec is not None
    stand_in = _Compiler(COMPILER)
    stand_in.__path__ = list(spec.submodule_search_locations or [])
    sys.modules[COMPILER] = stand_in
    # A plain attribute; without it torch would import the real module when it is asked for it.
    vars(torch)["_dynamo"] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(COMPILER) is stand_in:
            del sys.modules[COMPILER]
        if vars(torch).get("_dynamo") is stand_in:
            del vars(torch)["_dynamo"]


@contextlib.contextmanager
def _answer_questions() -> Iterator[None]:
    utils = importlib.import_module("transformers.utils")
    questions = importlib.import_module("transformers.utils.import_utils")
    before = {
        (module, name): vars(module)[name]
        for module in (utils, questions)
        for name in UNUSED
        if name in vars(module)
    }
    for module, name in before:
        setattr(module, name, lambda: False)
    define = questions.define_import_structure
    found = _find_models(define)

    def define_once(path: str, prefix: str | None = None) -> Any:
        """Return the list of all models, which transformers has made once already, or another."""
        is_all = prefix is None and Path(path).parent == _models_folder()
        return found if is_all and found else define(path, prefix)

    questions.define_import_structure = define_once  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        questions.define_import_structure = define  # pyright: ignore[reportAttributeAccessIssue]
        for (module, name), function in before.items():
            setattr(module, name, function)


def _models_folder() -> Path:
    file = sys.modules["transformers"].__file__
    assert file is not None
    return Path(file).parent / "models"


def _find_models(define: Any) -> Any:
    """Return what transformers would read of all files of all models; it has done so, and cached
    the answer under longer names.
    """
    if not define.cache_info().currsize:
        return None
    structure = define(_models_folder(), prefix="models")
    return {
        needed: {name.removeprefix("models."): objects for name, objects in modules.items()}
        for needed, modules in structure.items()
    }
