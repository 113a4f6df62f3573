"""Model families: the gate that checks a configuration, the registry, and special traits of
families.

Operators are found by the roles of modules (``tandem.models.planning.roles``), so a family whose
layers have the usual shape needs no module here.
"""

from tandem.models.families.gate import Checkpoint, head_dim_of, open_checkpoint, read_json
from tandem.models.families.registry import (
    FAMILIES,
    Family,
    choose_auto_class,
    classifies,
    find_family,
)

__all__ = [
    "FAMILIES",
    "Checkpoint",
    "Family",
    "choose_auto_class",
    "classifies",
    "find_family",
    "head_dim_of",
    "open_checkpoint",
    "read_json",
]
