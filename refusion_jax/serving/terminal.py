"""Shows an answer in a terminal while its slots are filled."""

import re
import time
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from refusion_jax.data.interface import Tokenizer
from refusion_jax.decoding.requests import Answer, Request
from refusion_jax.decoding.stops import Stops
from refusion_jax.serving.writer import Writer

MASK = "░"  # a place that is not committed yet
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a terminal would obey them
_SECONDS = 0.05  # between two updates


class Screen:
    """Draws an answer on the terminal inside a `with` block, at whose end it is erased.

    Committed tokens are shown as text, every other place as a gray mask. If the text is higher than the terminal, the
    part around the first mask is shown.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, eos_id: int, is_shown: bool = True):
        """Shows nothing yet. Unless `is_shown` on a terminal, only `text` is updated; `eos_id` ends an answer."""
        self.text, self.forwards = "", 0  # `text` is the certain part: from the beginning to the first mask
        self.finish_reason: str | None = None  # "stop" | "length" when it is finished
        self._places, self._eos_id, self._begins = request.settings.new_tokens, eos_id, len(request.prompt)
        self._writer = Writer(tokenizer, Stops(), self._places, self._begins if is_shown else None)
        self._pieces: dict[int, str] = {}
        self._console, self._drawn = Console(highlight=False), 0.0
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if is_shown else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
            self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, answer: Answer, is_finished: bool = False) -> None:
        delta = self._writer.read(answer, is_finished)
        self.text += delta.text
        self.finish_reason, self.forwards = delta.finish_reason, answer.forwards
        self._pieces |= delta.pieces
        ends = [at - self._begins for at, token in delta.commits if token == self._eos_id]
        self._places = min([self._places, *ends])
        if self._live and time.monotonic() - self._drawn > _SECONDS:
            self._draw()

    def _draw(self) -> None:
        text = Text("".join(printable(self._pieces.get(at, MASK)) for at in range(self._places)))
        text.highlight_regex(f"{MASK}+", "bright_black")
        height, lines = self._console.height - 1, text.wrap(self._console, self._console.width)
        gap = next((number for number, line in enumerate(lines) if MASK in line.plain), 0)
        top = max(0, min(gap - height // 2, len(lines) - height))
        self._live.update(Text("\n").join(lines[top : top + height]), refresh=True)
        self._drawn = time.monotonic()


def printable(text: str) -> str:
    """A model's text without control characters, which could move the cursor, change colors, or worse."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)
