"""Plan and load in one call, for tests that look at what is loaded."""

from tandem.models.loader import CausalModel, load_model
from tandem.models.planner import plan_model


def load_checkpoint(path_or_id, *, pool=None, progress=None, **options) -> CausalModel:
    """Load as ``plan_model(path_or_id, **options)`` says."""
    return load_model(plan_model(path_or_id, **options), pool, progress)
