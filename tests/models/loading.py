"""Plan and load in one call, for tests that look at what is loaded."""

from tandem.models.loading.loader import CausalModel, load_model
from tandem.models.planning.planner import plan_model


def load_checkpoint(
    path_or_id, *, pool=None, progress=None, is_written_behind=False, **options
) -> CausalModel:
    """Load as ``plan_model(path_or_id, **options)`` says."""
    plan = plan_model(path_or_id, **options)
    return load_model(plan, pool, progress, is_written_behind=is_written_behind)
