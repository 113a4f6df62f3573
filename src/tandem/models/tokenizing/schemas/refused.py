"""The error for schemas that are refused."""

__all__ = ["RefusedError"]


class RefusedError(Exception):
    """A schema that has no equivalent for llguidance.

    Args:
        keyword: keyword that cannot be expressed.
        why: the reason.
    """

    def __init__(self, keyword: str, why: str) -> None:
        self.keyword = keyword
        super().__init__(f"{keyword}: {why}")
