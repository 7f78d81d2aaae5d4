"""Stop strings: where an answer is cut, and whether that place is certain before the answer is finished."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Stops:
    """An answer ends before the first occurrence of any of these texts.

    Raises:
      ValueError: where one is empty, before which every answer would end.
    """

    texts: tuple[str, ...] = ()

    def __post_init__(self):
        if "" in self.texts:
            raise ValueError("a stop string is empty")

    def cut(self, text: str) -> tuple[str, bool]:
        """(the text before the first stop string in it, whether there is one)."""
        begin = self._begin(text)
        return (text, False) if begin is None else (text[:begin], True)

    def is_settled(self, text: str) -> bool:
        """Whether the text holds a stop string, and no continuation of it would be cut earlier.

        It might be where a longer stop string can begin before the one that was found, and is not complete yet.
        """
        begin = self._begin(text)
        return begin is not None and begin - 1 + max(map(len, self.texts)) <= len(text)

    def without_beginning(self, text: str) -> str:
        """The text without an end that may be the beginning of a stop string."""
        begins = (stop[:length] for stop in self.texts for length in range(1, len(stop)))
        return text[: len(text) - max((len(begin) for begin in begins if text.endswith(begin)), default=0)]

    def _begin(self, text: str) -> int | None:
        return min((at for stop in self.texts if (at := text.find(stop)) >= 0), default=None)
