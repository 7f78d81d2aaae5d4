"""One page that plays decodings in a browser, forward by forward; it loads nothing else."""

import collections
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

from refusion_jax.data.interface import Tokenizer
from refusion_jax.decoding.prompts import spelled
from refusion_jax.decoding.queue import Answer
from refusion_jax.decoding.requests import Request

MOST = 16  # decodings of a page
BEGINNING = b"<!doctype html><!-- decodings, by refusion_jax.generate -->"  # of every page


class Player:
    """Collects the decodings of a call."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._counts: dict[int, dict[int, int]] = collections.defaultdict(dict)  # index: forwards: committed tokens
        self._scenes: dict[int, dict[str, Any]] = {}

    def watch(self, index: int, answer: Answer) -> None:
        """Takes what `stream` tells it after each forward."""
        self._counts[index][answer.forwards] = len(answer.commit_order)

    def add(self, index: int, request: Request, answer: Answer, record: dict[str, Any]) -> None:
        """Takes a finished answer and its record of --output."""
        order = {place: number for number, place in enumerate(answer.commit_order)}
        text = dict(zip(answer.commit_order, answer.commit_tokens, strict=True))
        text |= {place: token for token, place in zip(*request.given, strict=True)}
        order |= dict.fromkeys(request.given[1], -1)
        places = sorted(text)
        first_after = dict(enumerate(places)).get(len(request.prompt) + len(record["tokens"]), request.length)
        cells = [
            [(self._spell(text, at), order.get(at, len(order)), int(at >= first_after)) for at in group]
            for group in groups_of(request)
            if any(at in text for at in group)
        ]
        self._scenes[index] = {
            "id": record["id"],
            "prompt": self._tokenizer.decode(request.prompt) if self._tokenizer else " ".join(map(str, request.prompt)),
            "groups": cells,  # of (text, number in the order of commitment or -1 if given, whether it is after the end)
            "counts": list(self._counts[index].values()),  # committed tokens after 0, 1, 2 .. forwards
        }

    def page(self) -> str:
        data = json.dumps([self._scenes[index] for index in sorted(self._scenes)]).replace("<", "\\u003c")
        page = resources.files("refusion_jax.decoding").joinpath("player.html").read_text("utf-8")
        return page.replace("DECODINGS", data)

    def _spell(self, text: Mapping[int, int], at: int) -> str:
        """What the token at a place adds to the text, or its name."""
        if at not in text:
            return ""
        named = self._tokenizer and (spelled(text, at, self._tokenizer) or self._tokenizer.name_of(text[at]))
        return named or str(text[at])


def groups_of(request: Request) -> Iterator[range]:
    """The places after the prompt, a given text or a slot at a time; without slots, each place of a gap alone."""
    at = len(request.prompt)
    for piece in request.pieces[1:]:
        end = at + (piece if isinstance(piece, int) else len(piece))
        size = request.settings.slot_size if isinstance(piece, int) else max(1, end - at)
        yield from (range(start, min(start + size, end)) for start in range(at, end, size))
        at = end
