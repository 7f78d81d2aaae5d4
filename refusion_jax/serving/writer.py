"""The text of an answer while it is written: certain text can be shown, and is never taken back."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from refusion_jax.data.interface import Tokenizer
from refusion_jax.decoding.prompts import CONTEXT, Decode, spelled, tokens_of
from refusion_jax.decoding.requests import Answer
from refusion_jax.decoding.stops import Stops

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # at the end, it stands for the bytes of an incomplete character


@dataclasses.dataclass(frozen=True)
class Delta:
    """What has been added to an answer, as in the events of OpenAI's streams."""

    text: str = ""  # in reading order, continues the deltas before
    finish_reason: str | None = None  # "stop" | "length" | "tool_calls" with the last delta
    tokens: Sequence[int] = ()  # of the whole answer so far
    commits: Sequence[tuple[int, int]] = ()  # (position, from the prompt's first, token) in the order of commitment
    pieces: Sequence[tuple[int, str]] = ()  # (place in the answer, text) of newly committed tokens, if asked for
    calls: Sequence[dict[str, Any]] = ()  # of tools, in OpenAI's form; see `tools`
    forwards: int | None = None  # of the answer so far; None if nothing was to be decoded
    rounds: int = 0


class Writer:
    """Cuts what a decoder has committed into deltas: text that has become certain."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Stops, limit: int, begins: int | None = None, decode: Decode | None = None
    ):
        """Begins an answer of at most `limit` tokens; with pieces if its first position is given.

        `decode` turns token ids into text; by default it is the tokenizer's.
        """
        self._tokenizer, self._stops, self._limit = tokenizer, stops, limit
        self._decode = decode or tokenizer.decode
        self._sent, self._commits, self._begins = "", 0, begins
        self._known: dict[int, int] = {}  # committed tokens by place in the answer ..
        self._told: dict[int, str] = {}  # .. and the text that was sent for them

    def read(self, answer: Answer, is_finished: bool) -> Delta:
        """The next delta of an answer that has grown; until the answer is finished, it ends before the first gap."""
        tokens = answer.tokens[: self._limit]
        text, is_cut = self._stops.cut(whole := self._decode(tokens))
        is_last, reason = is_finished or len(tokens) == self._limit, None
        if is_cut and (is_last or self._stops.is_certain(whole)):
            tokens, reason = tokens_of(text, tokens, self._decode), "stop"
        elif is_last:
            is_whole = is_finished and answer.finish_reason == "eos" and len(tokens) == len(answer.tokens)
            reason = "stop" if is_whole else "length"
        else:
            text = self._stops.without_beginning(text.rstrip(_INCOMPLETE))
        new = text[len(self._sent) :] if text.startswith(self._sent) else ""
        self._sent += new
        commits = list(zip(answer.commit_order, answer.commit_tokens, strict=True))[self._commits :]
        self._commits += len(commits)
        pieces = [] if self._begins is None else self._pieces(commits)
        return Delta(new, reason, tokens, commits, pieces, forwards=answer.forwards, rounds=answer.rounds)

    def _pieces(self, commits: list[tuple[int, int]]) -> list[tuple[int, str]]:
        """The texts that these commits add or change: a token's text may depend on those before it."""
        new = {position - self._begins: token for position, token in commits}
        self._known |= new
        places = {at + after for at in new for after in range(CONTEXT + 1)} & self._known.keys()
        texts = {at: spelled(self._known, at, self._tokenizer) for at in sorted(places)}
        pieces = [(at, text) for at, text in texts.items() if self._told.get(at) != text]
        self._told |= texts
        return pieces
