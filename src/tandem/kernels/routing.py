"""How a router chooses experts and weighs them, as data."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["SOFTMAX", "RoutingRule"]


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """From scores of all experts to the chosen ones and their weights."""

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    is_normalised: bool = False
    """Whether the weights of the chosen are scaled to sum to one."""
    num_groups: int = 1
    """Equal groups of experts, of which only the ``num_top_groups`` best count: those with the
    largest sum of their ``num_group_choices`` best choices."""
    num_top_groups: int = 1
    num_group_choices: Literal[1, 2] = 2
    weight_scale: float = 1.0
    """On the weights."""

    @property
    def native_scoring(self) -> str:
        """What the native router calls the first two."""
        return f"{self.scoring}_normalised" if self.is_normalised else self.scoring


SOFTMAX = RoutingRule()
