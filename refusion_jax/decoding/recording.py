"""Records what each forward of a decoding run feeds, so that the cost on another chip can be estimated.

A recording is one JSON object of a few kilobytes, however long the run:

    {"decoder": "...", "settings": "slot_size=4", "rows": 1, "shards": 1, "cache_length": 96, "rows_wait": false,
     "forwards": [{"width": 16, "tile": 16, "tiles": 1, "live_rows": 1, "times": 40}],
     "feeds":    [{"tokens": 12, "cached": 37, "times": 25}],
     "prefills": [{"rows": 1, "width": 32, "forwards": 1, "tokens": 22, "times": 8}],
     "answers":  [{"given": 22, "tokens": 17, "times": 3}]}

Each list is a histogram: `times` counts how often the other values of the entry occurred.

    forwards   of the decoding loop: the compiled shape (`width`: places a row, at most; `tiles` of `tile` places a
               shard), and the number of rows that took part
    feeds      of one row in one forward: the number of its tokens, and of the cache entries that they attend to (the
               middle of its bin, of 64 over `cache_length`; 0 for a decoder without a cache)
    prefills   the rows prefilled together, the number and width of the forwards, and the tokens given to all rows
    answers    the tokens given, and the tokens decoded, through the EOS

`rows_wait` says whether some rows of a batch wait while others have a forward of their own, so that one row tells
nothing about many.
"""

import collections
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

from refusion_jax.cli.errors import UserError
from refusion_jax.cli.settings import declared
from refusion_jax.decoding.decoder import Decoder
from refusion_jax.decoding.feeds import Counts, Shape, part_size
from refusion_jax.decoding.requests import Request
from refusion_jax.decoding.settings import Settings
from refusion_jax.distributed.json_input import JsonError, build, read_object

_MOST = 2**40  # the largest number that a file may hold


@dataclasses.dataclass(frozen=True)
class Forwards:
    """Forwards of the decoding loop with one shape and number of active rows."""

    width: int
    tile: int
    tiles: int
    live_rows: int
    times: int


@dataclasses.dataclass(frozen=True)
class Feeds:
    """What one row feeds in one forward."""

    tokens: int
    cached: int
    times: int


@dataclasses.dataclass(frozen=True)
class Prefills:
    """Prefills of some rows together; `tokens` is the sum over these rows."""

    rows: int
    width: int
    forwards: int
    tokens: int
    times: int


@dataclasses.dataclass(frozen=True)
class Answers:
    """Answers with one number of given and of decoded tokens."""

    given: int
    tokens: int
    times: int


@dataclasses.dataclass(frozen=True)
class Recording:
    """What a run feeds; its fields are explained at the top of this file."""

    decoder: str
    settings: str
    rows: int
    shards: int
    cache_length: int
    forwards: tuple[Forwards, ...]
    feeds: tuple[Feeds, ...]
    prefills: tuple[Prefills, ...]
    answers: tuple[Answers, ...]
    rows_wait: bool = False

    @property
    def tokens(self) -> int:
        """Decoded tokens of all answers."""
        return sum(one.tokens * one.times for one in self.answers)

    @property
    def row_forwards(self) -> int:
        """Forwards summed over rows."""
        return sum(one.times for one in self.feeds)

    @property
    def filler(self) -> float:
        """Places of all forwards divided by tokens that were fed: 1 without padding."""
        places = sum(one.tile * one.tiles * self.shards * one.times for one in self.forwards)
        return places / sum(one.tokens * one.times for one in self.feeds)

    def as_json(self) -> str:
        """The content of the file, with each histogram entry on a line."""
        parts = []
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, tuple):
                text = ",\n  ".join(map(json.dumps, value))
                parts.append(f"{json.dumps(name)}: [\n  {text}\n ]" if value else f"{json.dumps(name)}: []")
            else:
                parts.append(f"{json.dumps(name)}: {json.dumps(value)}")
        return "{" + ",\n ".join(parts) + "}\n"


def read_recording(path: epath.PathLike, flag: str) -> Recording:
    """Reads a recording from a file.

    Args:
      path: of the file.
      flag: that names it on the command line, for error messages.

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
    """The first implausible value, in words; or None."""
    may_be_0 = {"cached", "cache_length", "live_rows", "rows_wait", "tokens"}
    for own in (recording, *recording.forwards, *recording.feeds, *recording.prefills, *recording.answers):
        for name, value in dataclasses.asdict(own).items():
            least = 0 if name in may_be_0 else 1
            if isinstance(value, int) and not least <= value <= _MOST:
                return f"{name!r} must be {least} to {_MOST}"
    if not (recording.forwards and recording.tokens and any(one.tokens for one in recording.feeds)):
        return "it holds no token"
    return None


class Recorder:
    """Collects on the host what a queue feeds: pass it to `stream`, then call `recording`.

    Raises:
      UserError: for decoders that run more than one model.
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
        """Tells the sizes of the batch that is about to be decoded, and the shapes of its forwards."""
        self._shapes = shapes
        self._about = {"rows": rows, "shards": shards, "cache_length": decoder.cache_length}
        self._about["rows_wait"] = getattr(decoder, "rows_wait", False)

    def add_prefill(self, requests: Sequence[Request], rows: int, decoder: Decoder, shared: int) -> None:
        """Adds a prefill of some requests, padded to so many rows; their first `shared` tokens were copied.

        Only decoders with a `chunk` prefill.
        """
        if hasattr(decoder, "chunk"):
            given = [len(request.given[0]) - shared for request in requests]
            self._prefills[rows, decoder.chunk, -(-max(given) // decoder.chunk), sum(given)] += 1

    def add_forwards(self, counts: Counts) -> None:
        """Adds forwards that the device has counted."""
        size = part_size(self._about["cache_length"])
        for shape, live in zip(*np.nonzero(counts.forwards), strict=True):
            own = self._shapes[shape]
            self._forwards[own.width, own.tile, own.tiles, int(live)] += int(counts.forwards[shape, live])
        for tokens, part in zip(*np.nonzero(counts.feeds), strict=True):
            self._feeds[int(tokens), int(part) * size + size // 2] += int(counts.feeds[tokens, part])

    def add_answer(self, request: Request, answer: Any) -> None:
        """Adds a finished `Answer` of the queue."""
        end = len(request.prompt) + len(answer.tokens)
        decoded = np.count_nonzero(np.array(answer.commit_order, np.int64) < end)
        self._answers[len(request.given[0]), int(decoded)] += 1

    def recording(self) -> Recording:
        """All that was added."""
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
