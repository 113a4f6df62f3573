"""Model families: the gate that reads a configuration, the registry, and what is special to one.

Operators are found by the roles of modules (``tandem.models.planning.roles``), so a family whose
layers have the common shape needs no file here.
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
