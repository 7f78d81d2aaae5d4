"""Stop strings: where an answer is cut, and when enough of it is written to know where."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Stops:
    """Texts at the first of which an answer ends."""

    texts: tuple[str, ...] = ()

    def cut(self, text: str) -> tuple[str, bool]:
        """(the text up to the first stop string in it, whether there is one)."""
        begin = self._begin(text)
        return (text, False) if begin is None else (text[:begin], True)

    def is_settled(self, text: str) -> bool:
        """Whether the text is cut where any longer one that begins with it would be.

        A longer stop string might begin before one that is found, and end behind what is there.
        """
        begin = self._begin(text)
        return begin is not None and begin - 1 + max(map(len, self.texts)) <= len(text)

    def _begin(self, text: str) -> int | None:
        return min((at for stop in self.texts if (at := text.find(stop)) >= 0), default=None)
