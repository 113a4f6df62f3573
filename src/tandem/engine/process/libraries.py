"""The import of an engine's libraries, which takes most of an instance's start.

Half of what transformers imports with its first model (``torch.distributed.tensor``,
``torch._dynamo``, scipy) serves clusters, compilers and training. No public setting of torch or
transformers avoids it. So an instance's process imports these libraries at once, while the server
still imports its own.
"""

import contextlib
import gc
import importlib
import sys
from collections.abc import Generator

__all__ = ["import_libraries"]

LIBRARIES = (
    "tandem.engine.build",
    "tandem.engine.disaggregation.exchange",
    "tandem.engine.tiers.service",
    # The transformers modules of all models import these.
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.modeling_layers",
    "transformers.models.auto.modeling_auto",
)
"""Libraries that an engine imports for any model and settings."""


OPTIONAL = ("accelerate", "scipy", "sklearn")
"""Packages that transformers imports with its first model where they are installed, as fine-tuning
installs them. Serving uses none of them.
"""


def import_libraries() -> None:
    """Import the libraries that every model needs. Idempotent.

    The garbage collector is off meanwhile: it would take a sixth of the time, for objects that are
    never freed. Afterwards these objects are exempt from collection.
    """
    gc.disable()
    with _hide(OPTIONAL):
        for name in LIBRARIES:
            importlib.import_module(name)
    gc.freeze()
    gc.enable()


@contextlib.contextmanager
def _hide(names: tuple[str, ...]) -> Generator[None]:
    """Make packages that are not imported yet look as if they were not installed."""
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
