"""The feeds of a run as a file: what each forward of the decoding loop fed, so that it can be priced for another chip.

A recording is one JSON object, of a few kilobytes however long the run:

    {"decoder": "...", "settings": "slot_size=4", "rows": 1, "shards": 1, "cache_length": 96,
     "forwards": [{"width": 16, "tile": 16, "tiles": 1, "live_rows": 1, "times": 40}],
     "feeds":    [{"tokens": 12, "cached": 37, "times": 25}],
     "prefills": [{"rows": 1, "width": 32, "forwards": 1, "tokens": 22, "times": 8}],
     "answers":  [{"given": 22, "tokens": 17, "times": 3}]}

Each list is a histogram: `times` says how often the rest of its line was seen.

    forwards   of the decoding loop: the compiled shape (`width`: places of a row at most; `tiles` of `tile` places a
               shard), and the rows that took part
    feeds      of one row in one forward: the places that held a token, and the entries of its cache that they saw (the
               middle of a sixty-fourth part of `cache_length`; 0 where a decoder keeps no cache)
    prefills   rows prefilled together, in how many forwards of what width, and how many tokens were given to them
    answers    tokens given, and tokens of the answer that were decoded, its EOS included; those behind it serve nobody
"""

import collections
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

from refusion_jax.decoding.decoder import Decoder
from refusion_jax.decoding.feeds import Counts, Shape, part_size
from refusion_jax.decoding.requests import Request
from refusion_jax.decoding.settings import Settings
from refusion_jax.runtime.errors import UserError
from refusion_jax.runtime.json_input import JsonError, build, read_object
from refusion_jax.runtime.settings import declared

_MOST = 2**40  # of any number in a file


@dataclasses.dataclass(frozen=True)
class Forwards:
    """Of the decoding loop, alike in shape and in how many rows took part."""

    width: int
    tile: int
    tiles: int
    live_rows: int
    times: int


@dataclasses.dataclass(frozen=True)
class Feeds:
    """Of one row in one forward."""

    tokens: int
    cached: int
    times: int


@dataclasses.dataclass(frozen=True)
class Prefills:
    """Of some rows together; `tokens` are those of all of them."""

    rows: int
    width: int
    forwards: int
    tokens: int
    times: int


@dataclasses.dataclass(frozen=True)
class Answers:
    """Alike in the tokens that were given, and in those that were decoded."""

    given: int
    tokens: int
    times: int


@dataclasses.dataclass(frozen=True)
class Recording:
    """The feeds of a run; see the top of the file."""

    decoder: str
    settings: str
    rows: int
    shards: int
    cache_length: int
    forwards: tuple[Forwards, ...]
    feeds: tuple[Feeds, ...]
    prefills: tuple[Prefills, ...]
    answers: tuple[Answers, ...]

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(one.tokens * one.times for one in self.answers)

    @property
    def row_forwards(self) -> int:
        """Forwards of all answers: of those that rows shared, each row's own."""
        return sum(one.times for one in self.feeds)

    @property
    def filler(self) -> float:
        """Places of all forwards, over those that held a token."""
        places = sum(one.tile * one.tiles * self.shards * one.times for one in self.forwards)
        return places / sum(one.tokens * one.times for one in self.feeds)

    def as_json(self) -> str:
        """As the file has it: a line for each entry of a histogram."""
        parts = []
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, tuple):
                text = ",\n  ".join(map(json.dumps, value))
                parts.append(f"{json.dumps(name)}: [\n  {text}\n ]" if value else f"{json.dumps(name)}: []")
            else:
                parts.append(f"{json.dumps(name)}: {json.dumps(value)}")
        return "{" + ",\n ".join(parts) + "}\n"


def read_recording(path: epath.PathLike, flag: str) -> Recording:
    """The recording that a file holds.

    Args:
      path: of the file.
      flag: by which it was given, for messages.

    Raises:
      UserError: naming the file and what is wrong with it.
    """
    try:
        recording = build(Recording, read_object(path))
    except JsonError as error:
        raise UserError(f"--{flag}={path}: is no recording of feeds: {error}") from error
    if fault := _fault(recording):
        raise UserError(f"--{flag}={path}: is no recording of feeds: {fault}")
    return recording


def _fault(recording: Recording) -> str | None:
    """What makes no sense in it, if anything."""
    may_be_0 = {"cached", "cache_length", "live_rows", "tokens"}
    for own in (recording, *recording.forwards, *recording.feeds, *recording.prefills, *recording.answers):
        for name, value in dataclasses.asdict(own).items():
            least = 0 if name in may_be_0 else 1
            if isinstance(value, int) and not least <= value <= _MOST:
                return f"{name!r} must be {least} to {_MOST}"
    if not (recording.forwards and recording.tokens and any(one.tokens for one in recording.feeds)):
        return "it holds no token"
    return None


class Recorder:
    """Collects the feeds of a queue, on the host: hand it to `stream`, then take the recording.

    Raises:
      UserError: where a forward of the decoder feeds more than one model.
    """

    def __init__(self, settings: Settings):
        if settings.companions:
            raise UserError(
                f"the decoder {settings.method!r} cannot be recorded: a forward of it feeds "
                f"{1 + len(settings.companions)} models"
            )
        self._settings, self._about = settings, {}
        self._shapes: tuple[Shape, ...] = ()
        self._forwards, self._feeds, self._prefills, self._answers = (collections.Counter() for _ in range(4))

    def begin(self, decoder: Decoder, shapes: tuple[Shape, ...], rows: int, shards: int) -> None:
        """A batch of so many rows, in so many shards, is about to be decoded in forwards of these shapes."""
        self._shapes = shapes
        self._about = {"rows": rows, "shards": shards, "cache_length": decoder.cache_length}

    def add_prefill(self, requests: Sequence[Request], rows: int, decoder: Decoder, shared: int) -> None:
        """Some requests were prefilled, with filler up to so many rows, by a decoder that says how (`chunk`).

        Their first `shared` tokens were copied.
        """
        if hasattr(decoder, "chunk"):
            given = [len(request.given[0]) - shared for request in requests]
            self._prefills[rows, decoder.chunk, -(-max(given) // decoder.chunk), sum(given)] += 1

    def add_forwards(self, counts: Counts) -> None:
        """Some more forwards, as the device has counted them."""
        size = part_size(self._about["cache_length"])
        for shape, live in zip(*np.nonzero(counts.forwards), strict=True):
            own = self._shapes[shape]
            self._forwards[own.width, own.tile, own.tiles, int(live)] += int(counts.forwards[shape, live])
        for tokens, part in zip(*np.nonzero(counts.feeds), strict=True):
            self._feeds[int(tokens), int(part) * size + size // 2] += int(counts.feeds[tokens, part])

    def add_answer(self, request: Request, answer: Any) -> None:
        """An answer is finished: an `Answer` of the queue."""
        end = len(request.prompt) + len(answer.tokens)
        decoded = np.count_nonzero(np.array(answer.commit_order, np.int64) < end)
        self._answers[len(request.given[0]), int(decoded)] += 1

    def recording(self) -> Recording:
        """All of it."""
        defaults = {name: own.default for name, own in declared(type(self._settings)).items()}
        own = {name: getattr(self._settings, name) for name in defaults if name != "method"}
        changed = [f"{name}={value}" for name, value in own.items() if value != defaults[name]]
        histograms = {
            name: tuple(of(*key, times) for key, times in sorted(counter.items()))
            for name, of, counter in (
                ("forwards", Forwards, self._forwards),
                ("feeds", Feeds, self._feeds),
                ("prefills", Prefills, self._prefills),
                ("answers", Answers, self._answers),
            )
        }
        return Recording(self._settings.method, " ".join(changed), **self._about, **histograms)
