"""Stop strings: where an answer is cut, and whether that place is certain before the answer is finished."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Stops:
    """An answer ends before the first occurrence of any of these texts; ValueError if one is empty."""

    texts: tuple[str, ...] = ()

    def __post_init__(self):
        if "" in self.texts:
            raise ValueError("a stop string is empty")

    def cut(self, text: str) -> tuple[str, bool]:
        """(the text before the first stop string in it, whether there is one)."""
        begin = self._begin(text)
        return (text, False) if begin is None else (text[:begin], True)

    def is_certain(self, text: str) -> bool:
        """Whether the text holds a stop string, and no continuation of it would be cut earlier.

        It could be if a longer stop string, not complete yet, can begin before the one that was found; U+FFFD at the
        end may stand for a character that is not complete yet.
        """
        begin = self._begin(text)
        return begin is not None and begin - 1 + max(map(len, self.texts)) <= len(text.rstrip("\ufffd"))

    def without_beginning(self, text: str) -> str:
        return text[: min((_begins_at_end(text, stop) for stop in self.texts), default=len(text))]

    def _begin(self, text: str) -> int | None:
        return min((at for stop in self.texts if (at := text.find(stop)) >= 0), default=None)


def _begins_at_end(text: str, stop: str) -> int:
    """The index where the longest suffix of the text begins that is a prefix of `stop`; len(text) if there is none."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)
