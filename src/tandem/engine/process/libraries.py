"""The import of an engine's libraries, which takes most of an instance's start."""

import gc
import importlib

from tandem.models.deferred_imports import defer_imports

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


def import_libraries() -> None:
    """Import the libraries that every model needs, and no others. Idempotent.

    The garbage collector is off meanwhile: it would take a sixth of the time, for objects that are
    never freed. Afterwards these objects are exempt from collection.
    """
    gc.disable()
    defer_imports()
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
