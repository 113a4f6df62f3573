"""Search for stop strings in text that arrives in pieces.

One Aho-Corasick automaton for all stop strings: it takes a dictionary lookup per character,
whatever their number, and its state is the longest suffix that may still become a stop string,
which must be held back. The result does not depend on how the text was cut: the stop string that
completes first wins, and the longest of those that complete together.
"""

from collections import deque
from collections.abc import Sequence

__all__ = ["StopMatcher", "StopStrings"]


class StopStrings:
    """The automaton of a set of stop strings; immutable, shared by the choices of a request.

    Args:
        strings: stop strings, none empty. Cost: time and memory proportional to their total length.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        assert all(strings), strings
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.match: list[str | None] = [None]
        for string in strings:
            self._insert(string)
        self.fallback = [0] * len(self.children)
        self._link()

    def _insert(self, string: str) -> None:
        state = 0
        for char in string:
            child = self.children[state].get(char)
            if child is None:
                child = len(self.children)
                self.children[state][char] = child
                self.children.append({})
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = child
        self.match[state] = string

    def _link(self) -> None:
        # States are linked breadth first: a state's fallback is shorter, so it is complete when it
        # is needed.
        queue = deque(self.children[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self.children[state].items():
                self.fallback[child] = self.step(self.fallback[state], char)
                queue.append(child)
            if self.match[state] is None:
                self.match[state] = self.match[self.fallback[state]]

    def step(self, state: int, char: str) -> int:
        """Return the state that follows ``state`` when ``char`` is read."""
        children = self.children
        while state and char not in children[state]:
            state = self.fallback[state]
        return children[state].get(char, 0)


class StopMatcher:
    """A matcher that ends one generation's text at the first stop string.

    Args:
        stops: the stop strings.
        keep_match: True if the stop string itself is part of the text.
    """

    def __init__(self, stops: StopStrings, *, keep_match: bool) -> None:
        self._stops = stops
        self._keep_match = keep_match
        self._state = 0
        self._held = ""
        self.matched: str | None = None
        """Stop string that was found, after which all further text is ignored; None: none was found
        yet.
        """

    def feed(self, text: str) -> str:
        """Add text; return the part that certainly belongs to the answer, because no stop string
        can begin in it.
        """
        assert self.matched is None, self.matched
        stops, state = self._stops, self._state
        for position, char in enumerate(text, start=1):
            state = stops.step(state, char)
            match = stops.match[state]
            if match is not None:
                self.matched = match
                found = self._held + text[:position]
                self._held = ""
                return found if self._keep_match else found[: len(found) - len(match)]
        self._state = state
        ready = self._held + text
        cut = len(ready) - stops.depth[state]
        self._held = ready[cut:]
        return ready[:cut]

    def flush(self) -> str:
        """End the text; return the part that was held back because a stop string might have begun
        in it.
        """
        held, self._held, self._state = self._held, "", 0
        return held
