"""Importing what an engine needs, which is nearly all of an instance's start.

Half of what transformers imports with its first model (``torch.distributed.tensor``,
``torch._dynamo``, scipy) serves clusters, compilers and training. No public setting of torch or of
transformers leaves it out, and their private parts are not ours to replace. The start of the server
hides it instead: an instance imports while the server does.
"""

import gc
import importlib

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
"""Libraries that an engine imports, whatever its model and settings."""


def import_libraries() -> None:
    """Import the libraries that every model needs. Idempotent.

    Without the garbage collector, which spends a sixth of the time on objects that stay for good,
    and never looks at them later.
    """
    gc.disable()
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
