"""Requests: prompts and templates with gaps, checked and laid out as arrays; and their answers.

Everything here runs on the host, once per request. Axes: R requests, N places of a row, C cache entries.
"""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from flax import struct
from jaxtyping import Array, ArrayLike, Bool, Int32

from refusion_jax.cli.errors import SettingError, UserError
from refusion_jax.cli.settings import scope
from refusion_jax.decoding.sampling import Record
from refusion_jax.decoding.settings import Settings, TokenIds, TracedSettings
from refusion_jax.model.key_values import KeyValues
from refusion_jax.model.shape import ModelConfig

ROUNDING = 32  # cache lengths are multiples of this, so that few programs are compiled
_TOKENS = "token ids, as the encode_prompts of a tokenizer makes of each text"
PREFILL_CHUNK = 256  # most given tokens per forward of the prefill


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A prompt and what is to be decoded after it; equal only to itself.

    `template` lists given tokens and lengths of gaps in text order: `([5, 6], 40, [7], 24)` asks for 40 tokens between
    5 6 and 7, and for 24 after 7. Given tokens are committed first; then the gaps are decoded, and see all of
    them. EOS is only allowed in a gap after the last given token, and after `least` tokens of the answer. An empty
    template means one gap of max_new_tokens.
    """

    prompt: Sequence[int]
    template: tuple[Sequence[int] | int, ...] = ()
    settings: Settings | None = None  # if they differ from the call's; batch_size and cache_length cannot
    noise: int | None = None  # below 2^32; sampling noise is a function of (settings.seed, this number, position,
    # forward pass). By default 0 for a request with settings of its own, else its number in the call
    name: str = ""  # in error messages
    grammar: Any = None  # for the answer: a `constrained.Matcher` that has consumed nothing
    least: int = 0  # least number of tokens before an EOS; must be 0 with a grammar

    @functools.cached_property
    def parts(self) -> list[tuple[range, Sequence[int] | None]]:
        """(positions in the text, the tokens given there; None: a gap) of the prompt and the parts of the template."""
        parts, at = [], 0
        for part in (self.prompt, *(self.template or (self.settings.new_tokens,))):
            end = at + (part if isinstance(part, int) else len(part))
            parts.append((range(at, end), None if isinstance(part, int) else part))
            at = end
        return parts

    @property
    def in_template(self) -> int:
        """Number of the answer's tokens that the template gives."""
        return sum(len(part) for part in self.template if not isinstance(part, int))

    @property
    def length(self) -> int:
        """The maximal length of the whole text, given and decoded."""
        return self.parts[-1][0].stop

    @property
    def given(self) -> tuple[list[int], list[int]]:
        """(tokens, their positions in the text) of all that is given, in text order."""
        given = [(places, tokens) for places, tokens in self.parts if tokens is not None]
        tokens = [token for _, some in given for token in some]
        return tokens, [place for places, _ in given for place in places]

    @functools.cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """(first position, length) of each gap, in text order."""
        return [(places.start, len(places)) for places, tokens in self.parts if tokens is None]

    @property
    def ends_from(self) -> int:
        """The first position at which an EOS may be written."""
        return max(max(self.given[1], default=-1) + 1, len(self.prompt) + self.least)


@struct.dataclass
class Given:
    """The given tokens of some requests, padded on the right."""

    tokens: Int32[ArrayLike, "R C"]
    positions: Int32[ArrayLike, "R C"]
    length: Int32[ArrayLike, "R"]
    entries: KeyValues | None = None  # C of each row, of which the first are those of leading tokens, computed before
    known: Int32[Array, ""] | None = None  # how many, in every row

    @classmethod
    def of(cls, requests: Sequence[Request], capacity: int) -> "Given":
        tokens, positions = np.zeros((2, len(requests), capacity), np.int32)
        length = np.zeros(len(requests), np.int32)
        for row, request in enumerate(requests):
            own, places = request.given
            tokens[row, : len(own)], positions[row, : len(own)], length[row] = own, places, len(own)
        return cls(tokens, positions, length)


@struct.dataclass
class Places:
    """The places to decode, in text order; entries from index `count` on are unused."""

    position: Int32[ArrayLike, "R N"]  # in the text
    ends_from: Int32[ArrayLike, "R"]  # the first position at which an EOS may be written
    count: Int32[ArrayLike, "R"]

    @classmethod
    def of(cls, requests: Sequence[Request], capacity: int) -> "Places":
        position, count = np.zeros((len(requests), capacity), np.int32), np.zeros(len(requests), np.int32)
        for row, request in enumerate(requests):
            for at, length in request.gaps:
                position[row, count[row] : count[row] + length] = range(at, at + length)
                count[row] += length
        return cls(position, np.array([request.ends_from for request in requests], np.int32), count)

    def may_end(self, positions: Int32[Array, "B T"]) -> Bool[Array, "B T"]:
        return positions >= self.ends_from[:, None]


@struct.dataclass
class Layout:
    """Requests as arrays."""

    given: Given
    places: Any  # to decode: `Places`, or the decoder's own type
    settings: TracedSettings

    @classmethod
    def of(cls, requests: Sequence[Request], capacity: int, places: Any) -> "Layout":
        return cls(Given.of(requests, capacity), places, TracedSettings.of([request.settings for request in requests]))


def most_new_tokens(requests: Sequence[Request]) -> int:
    """The largest number of tokens to decode among the requests."""
    return max(sum(length for _, length in request.gaps) for request in requests)


def rounded_up(length: int) -> int:
    """The next multiple of ROUNDING."""
    return -(-length // ROUNDING) * ROUNDING


def text_capacity(requests: Sequence[Request]) -> int:
    """Length of the longest text, rounded up so that few sizes are compiled; at least the setting `cache_length`."""
    text = max(request.length for request in requests)
    return max(requests[0].settings.cache_length, rounded_up(text))


def prepare(requests: Sequence[Sequence[int] | Request], settings: Settings, model: ModelConfig) -> list[Request]:
    """Checks prompts and requests, and completes their settings; UserError names the request, reason and remedy.

    Tokens may be any sequences or arrays of whole numbers; those of the result are lists.
    """
    room = settings.cache_length or model.max_position_embeddings
    if model.local_rope and room > model.max_position_embeddings:
        settings.refuse("cache_length", f"the model's local layers attend to {model.max_position_embeddings} tokens")
    of_call = {name: getattr(settings, name) for name in scope(Settings, "batch")}
    filled = []
    for i, request in enumerate(requests):
        request = request if isinstance(request, Request) else Request(request)
        default, own = (0, request.settings) if request.settings else (i, settings)
        noise = default if request.noise is None else request.noise
        own, name = dataclasses.replace(own, **of_call), request.name or f"prompt {i}"
        parts = (int(x) if isinstance(x, int | np.integer) else whole_numbers(name, x) for x in request.template)
        prompt, template = whole_numbers(name, request.prompt), tuple(parts)
        request = dataclasses.replace(request, prompt=prompt, template=template, settings=own, noise=noise, name=name)
        filled.append(dataclasses.replace(request, settings=_complete(request, model, room)))
        _check(filled[-1], model.num_tokens, room)
    return filled


def _complete(request: Request, model: ModelConfig, room: int) -> Settings:
    """The settings of a request, with the default of max_new_tokens filled in, which templates do not use."""
    settings = request.settings.for_model(model)
    if request.template:
        return settings
    try:
        return settings.fill_in(room - len(request.prompt))
    except SettingError as error:
        raise UserError(f"{request.name}: {error} of what fits after its {len(request.prompt)} tokens") from error


def whole_numbers(name: str, given: Iterable[int], what: str = _TOKENS) -> list[int]:
    """Whole numbers, such as token ids, as a list, from any sequence or array; UserError if any is not whole."""
    with contextlib.suppress(TypeError):
        found = given.tolist() if hasattr(given, "tolist") else [*given]  # iterating a JAX array takes 50 us per token
        if bool not in map(type, found):
            return [*map(operator.index, found)]
    raise UserError(f"{name}: must be a list of {what}")


def check_tokens(name: str, given: Sequence[int], num_tokens: int) -> None:
    """Raises UserError, which names the text, if it has no tokens or any that the model does not know."""
    if not given:
        raise UserError(f"{name}: is empty; it needs at least one token")
    if not 0 <= min(given) <= max(given) < num_tokens:
        raise UserError(f"{name}: holds an id outside 0 to {num_tokens - 1}")


def _check(request: Request, num_tokens: int, room: int) -> None:
    given, gaps = request.given[0], [piece for piece in request.template if isinstance(piece, int)]
    check_tokens(request.name, given, num_tokens)
    if request.template and (not gaps or min(gaps) < 1):
        raise UserError(f"{request.name}: a template needs gaps, each of at least one token")
    if request.length > room:
        fix = "shorten the template" if gaps else "shorten it, lower max_new_tokens"
        raise UserError(
            f"{request.name}: has {len(given)} tokens, and {request.length - len(given)} new ones do not fit "
            f"{'between' if gaps else 'after'} them in a cache of {room}: {fix}, or raise cache_length"
        )


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer. Positions count from the start of the prompt."""

    tokens: list[int]  # in reading order, through the first EOS; with the given tokens of a template after the prompt
    commit_order: list[int]  # positions of all decoded tokens, in the order of commitment
    commit_tokens: list[int]  # the tokens at these positions, including any after the first EOS
    forwards: int  # of the decoding loop; the prefill is not counted
    rounds: int  # plans followed; for decoders that do not plan, forward passes
    finish_reason: str  # "eos", "length", or "stop" if the caller stopped it


def read_answer(
    request: Request, record: Record, forwards: np.ndarray, rounds: np.ndarray, ids: TokenIds, is_ended: bool = False
) -> Answer:
    """The answer in a row's record, up to its first gap if the caller stopped it; UserError for a faulty record."""
    positions, tokens = record.positions[: record.count].tolist(), record.tokens[: record.count].tolist()
    text = dict(zip(positions, tokens, strict=True))
    asked = {at for places, given in request.parts if given is None for at in places}
    by = f"{request.name}: the decoder {request.settings.method!r} commits"
    if not all(0 <= token < ids.num_tokens for token in tokens):
        raise UserError(f"{by} what is not a token, as when logits are not finite")
    if not text.keys() <= asked or len(text) < len(tokens):
        raise UserError(f"{by} a place twice, or one that it should not decode: {tokens} at {positions}")
    end = min((at for at, token in text.items() if token == ids.eos_id), default=None)
    for given, own in request.parts[1:]:  # without the prompt, which may be long
        text |= {} if own is None else dict(zip(given, own, strict=True))
    places = [at for at in sorted(text) if end is None or at <= end]
    if is_ended:
        places = [at for number, at in enumerate(places, len(request.prompt)) if number == at]
    return Answer(
        tokens=[text[at] for at in places],
        commit_order=positions,
        commit_tokens=tokens,
        forwards=int(forwards),
        rounds=int(rounds),
        finish_reason="stop" if is_ended else "eos" if ids.eos_id in tokens else "length",
    )
