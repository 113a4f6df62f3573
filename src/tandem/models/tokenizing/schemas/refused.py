"""The refusal of a schema."""

__all__ = ["RefusedError"]


class RefusedError(Exception):
    """A schema that has no equivalent here.

    Args:
        keyword: that stands in the way.
        why: in words.
    """

    def __init__(self, keyword: str, why: str) -> None:
        self.keyword = keyword
        super().__init__(f"{keyword}: {why}")
