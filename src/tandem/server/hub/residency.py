"""The decision which models are awake within a memory budget. Pure.

Models wake in the order in which they were first asked for. To make room, those sleep that nobody
asked for the longest; one that is busy ends its requests first, and its new ones wait their turn.
"""

from collections.abc import Collection, Mapping

from tandem.core.errors import ConfigError

__all__ = ["Residency"]


class Residency:
    """The models that are awake, and their needs.

    Args:
        budget_bytes: for all that are awake together; 0: there is no bound.
        needs: bytes of each model.

    Raises: ConfigError (one model needs more than there is).
    """

    def __init__(self, budget_bytes: int, needs: Mapping[str, int]) -> None:
        self._budget = budget_bytes
        self._needs = dict(needs)
        self._awake: dict[str, None] = {}
        """In the order of their latest use."""
        for name, need in needs.items():
            self._check(name, need)

    def _check(self, name: str, need: int) -> None:
        if self._budget and need > self._budget:
            raise ConfigError(
                "hub.configure",
                f"{name} needs {need / 2**20:.0f} MiB, the budget is {self._budget / 2**20:.0f}: "
                "raise it, or give the model less KV",
                field="memory",
            )

    @property
    def awake(self) -> list[str]:
        """Models that hold memory, the one used longest ago first."""
        return list(self._awake)

    @property
    def used_bytes(self) -> int:
        """Bytes of those that are awake."""
        return sum(self._needs[name] for name in self._awake)

    def need_of(self, name: str) -> int:
        """Return the bytes of a model."""
        return self._needs[name]

    def note_need(self, name: str, need: int) -> None:
        """Take in what a model really needs, if that is more than was said."""
        self._needs[name] = max(self._needs[name], need)

    def note_use(self, name: str) -> None:
        """Record that a model was asked for."""
        if name in self._awake:
            del self._awake[name]
            self._awake[name] = None

    def note_awake(self, name: str) -> None:
        """Record that a model holds memory from now on."""
        self._awake[name] = None

    def note_asleep(self, name: str) -> None:
        """Record that a model holds none."""
        self._awake.pop(name, None)

    def choose_victims(
        self, name: str, busy: Collection[str], pinned: Collection[str]
    ) -> list[str]:
        """Return which models must sleep before one can wake; idle ones go first.

        Raises: ConfigError (what is pinned leaves too little room).
        """
        if not self._budget or name in self._awake:
            return []
        free = self._budget - self.used_bytes - self._needs[name]
        candidates = [each for each in self._awake if each not in pinned]
        candidates.sort(key=lambda each: each in busy)
        victims: list[str] = []
        while free < 0 and candidates:
            victims.append(candidates.pop(0))
            free += self._needs[victims[-1]]
        # If no pinned model is in the way and there are models to evict, only an estimate says that
        # the model does not fit; load it anyway.
        if free < 0 and (pinned or not victims):
            raise ConfigError(
                "hub.wake",
                f"{name} needs {self._needs[name] / 2**20:.0f} MiB, and pinned models leave less",
                field="model",
            )
        return victims
