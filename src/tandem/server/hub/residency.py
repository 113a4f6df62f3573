"""The decision which models are awake within a memory budget. Pure.

To make room for a model, those are put to sleep that were unused longest; idle models before busy
ones, which first end their requests.
"""

from collections.abc import Collection, Mapping

from tandem.core.errors import CapacityError, ConfigError

__all__ = ["Residency"]


class Residency:
    """The awake models and the memory needs of all models.

    Args:
        budget_bytes: memory for all awake models together; 0: no limit.
        needs: bytes that each model needs while awake, by name.

    Raises: ConfigError (one model needs more than the budget).
    """

    def __init__(self, budget_bytes: int, needs: Mapping[str, int]) -> None:
        self._budget = budget_bytes
        self._needs = dict(needs)
        self._awake: dict[str, None] = {}
        """Awake models in order of their latest use, least recently used first."""
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
        """Awake models, least recently used first."""
        return list(self._awake)

    @property
    def used_bytes(self) -> int:
        """Bytes that the awake models need."""
        return sum(self._needs[name] for name in self._awake)

    def need_of(self, name: str) -> int:
        """Return the bytes that a model needs while awake."""
        return self._needs[name]

    def note_need(self, name: str, need: int) -> None:
        """Raise a model's need to its measured size, if that is larger."""
        self._needs[name] = max(self._needs[name], need)

    def note_use(self, name: str) -> None:
        """Record that a request asked for a model, which makes it the most recently used."""
        if name in self._awake:
            del self._awake[name]
            self._awake[name] = None

    def note_awake(self, name: str) -> None:
        """Record that a model takes memory from now on."""
        self._awake[name] = None

    def note_asleep(self, name: str) -> None:
        """Record that a model takes no memory any more."""
        self._awake.pop(name, None)

    def choose_victims(
        self, name: str, busy: Collection[str], pinned: Collection[str]
    ) -> list[str]:
        """Return the models that must be put to sleep before ``name`` can wake, idle ones first.

        Args:
            name: model to wake.
            busy: models with live requests.
            pinned: models that must stay awake.

        Raises: CapacityError (pinned models that are awake leave too little room, until one is
            unpinned); ConfigError (nothing is awake, and there is too little).
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
        in_the_way = sorted(each for each in self._awake if each in pinned)
        needed = f"{name} needs {self._needs[name] / 2**20:.0f} MiB"
        if free < 0 and in_the_way:
            what = f"{needed}, and {', '.join(in_the_way)} are pinned: try again later, or unpin"
            raise CapacityError("hub.wake", what, field="model")
        # If there are models to evict, only an estimate says that the model does not fit; load it
        # anyway.
        if free < 0 and not victims:
            budget = f"the budget is {self._budget / 2**20:.0f}"
            what = f"{needed}, {budget}: raise it, or give the model less KV"
            raise ConfigError("hub.wake", what, field="model")
        return victims
