"""What is to be decoded: prompts, and templates with gaps, laid out as slots at places of a text.

Everything here runs on the host, once a request. Axes: R requests, N slots a row, C cache entries.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from refusion_jax.decoding.settings import DecodeSettings, Static, token_ids
from refusion_jax.model.transformer import ModelConfig
from refusion_jax.runtime.errors import UserError

_ROUNDING = 32  # cache lengths are multiples of this, so that few are compiled
_CHUNK = 256  # given tokens a forward of the prefill, at most
_WIDTHS = 3  # forwards of so many widths are compiled, each half as wide as the next


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and what is to follow it.

    `template` lists given tokens and lengths of gaps in text order: `([5, 6], 40, [7], 24)` wants 40 tokens between 5 6
    and 7, and 24 behind. What is given is committed first, and the gaps are decoded around it. A gap that has given
    tokens behind it cannot end the text. Without a template a gap of max_new_tokens follows the prompt.
    """

    prompt: Sequence[int]
    template: tuple[Sequence[int] | int, ...] = ()
    settings: DecodeSettings | None = None  # where they are not those of the call
    noise: int = 0  # below 2^32; its sampling noise is a function of (settings.seed, this, position)
    name: str = ""  # for messages

    @property
    def pieces(self) -> list[Sequence[int] | int]:
        """Prompt and template as one list of given tokens and lengths of gaps."""
        return [self.prompt, *(self.template or (self.settings.new_tokens,))]

    @property
    def length(self) -> int:
        """Tokens of the whole text at most, given and decoded."""
        return sum(piece if isinstance(piece, int) else len(piece) for piece in self.pieces)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Canvas:
    """Where the slots of each row stand; slots of size 0 do not exist."""

    start: jax.Array  # [R, N] int32, position of each slot's first token in the text
    size: jax.Array  # [R, N] int32, its tokens; slot_size but for the last slot of a gap
    may_end: jax.Array  # [R, N] bool, an EOS may be written there
    per_block: jax.Array  # [R] int32, slots of a serial block
    widest: jax.Array  # [R] int32, tokens that one forward of the row may feed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Given:
    """The tokens that are committed first, padded on the right."""

    tokens: jax.Array  # [R, C] int32
    positions: jax.Array  # [R, C] int32
    length: jax.Array  # [R] int32


def slots_of(request: Request) -> tuple[list[int], list[int], list[bool], int]:
    """(starts, sizes, may_end, slots a block) of a request's slots: each gap cut into slots, the last may be short."""
    starts, sizes, ends, at = [], [], [], 0
    pieces, K = request.pieces, request.settings.slot_size
    last_given = max(index for index, piece in enumerate(pieces) if not isinstance(piece, int) and len(piece))
    for index, piece in enumerate(pieces):
        if isinstance(piece, int):
            cut = range(at, at + piece, K)
            starts += cut
            sizes += [min(K, at + piece - start) for start in cut]
            ends += [index > last_given] * len(cut)
        at += piece if isinstance(piece, int) else len(piece)
    return starts, sizes, ends, -(-len(starts) // request.settings.serial_blocks)


def lay_out(requests: Sequence[Request], static: Static) -> tuple[Canvas, Given]:
    """Arrays of some requests."""
    R = len(requests)
    start, size = np.zeros((2, R, static.slots), np.int32)
    may_end, (per_block, widest) = np.zeros((R, static.slots), bool), np.ones((2, R), np.int32)
    tokens, positions = np.zeros((2, R, static.cache_length), np.int32)
    length = np.zeros(R, np.int32)
    for row, request in enumerate(requests):
        starts, sizes, ends, per_block[row] = slots_of(request)
        n = len(starts)
        widest[row] = _widest(request, n, per_block[row])
        start[row, :n], size[row, :n], may_end[row, :n] = starts, sizes, ends
        at = 0
        for piece in request.pieces:
            if not isinstance(piece, int):
                into = slice(length[row], length[row] + len(piece))
                tokens[row, into], positions[row, into] = piece, range(at, at + len(piece))
                length[row] += len(piece)
            at += piece if isinstance(piece, int) else len(piece)
    return Canvas(start, size, may_end, per_block, widest), Given(tokens, positions, length)


def _widest(request: Request, slots: int, per_block: int) -> int:
    """Tokens of its widest forward: a block; where overlapped, the next block as well, or a slot and its guesses."""
    s = request.settings
    blocks = 2 if s.overlap_planning and slots > per_block else 1
    return s.slot_size * max(per_block * blocks, 2 if s.overlap_infilling else 1)


def sizes_for(requests: Sequence[Request], model: ModelConfig) -> Static:
    """The least sizes that serve all of these requests; texts rounded up a little, so that few are compiled.

    The cache holds the longest text and, behind it, what the widest forward writes.

    Raises:
      UserError: where the requests' settings differ in something that is compiled in.
    """
    settings = requests[0].settings
    for request in requests:
        for name in ("method", "slot_size", "eos_id", "mask_id"):
            if getattr(request.settings, name) != getattr(settings, name):
                raise UserError(f"{request.name}: {name} must be the same for all prompts of a call")
    K = settings.slot_size
    slots, per_block = zip(*((len(starts), per) for starts, _, _, per in map(slots_of, requests)), strict=True)
    widths = (2,)  # the last token, and a mask token
    if settings.method == "refusion":
        widest = max(map(_widest, requests, slots, per_block))
        widths = tuple(sorted({max(-(-widest >> i), K) for i in range(_WIDTHS)}))
    text = max(request.length for request in requests)
    given = max(sum(len(p) for p in request.pieces if not isinstance(p, int)) for request in requests)
    return Static(
        method=settings.method,
        slot_size=K,
        slots=max(slots),
        block_slots=max(per_block),
        widths=widths,
        cache_length=max(settings.cache_length, -(-text // _ROUNDING) * _ROUNDING) + widths[-1],
        chunk=min(_CHUNK, -(-given // _ROUNDING) * _ROUNDING),
        **token_ids(settings, model),
    )


def prepare(requests: Sequence[Sequence[int] | Request], settings: DecodeSettings, model: ModelConfig) -> list[Request]:
    """Checks prompts and requests, and gives each all of its settings.

    Raises:
      UserError: naming the request, the reason, and what would help.
    """
    room = settings.cache_length or model.max_position_embeddings
    named = []
    for i, request in enumerate(requests):
        request = request if isinstance(request, Request) else Request(request)
        own = {} if request.settings else {"settings": settings, "noise": i}
        named.append(dataclasses.replace(request, name=request.name or f"prompt {i}", **own))
    longest = max((len(request.prompt) for request in named), default=0)
    filled = [dataclasses.replace(r, settings=r.settings.fill_in(room - longest)) for r in named]
    for request in filled:
        _check(request, model.vocab_size, room)
    return filled


def _check(request: Request, vocab_size: int, room: int) -> None:
    given = [token for piece in request.pieces if not isinstance(piece, int) for token in piece]
    gaps = [piece for piece in request.template if isinstance(piece, int)]
    if not given:
        raise UserError(f"{request.name}: is empty; it needs at least one token")
    if not 0 <= min(given) <= max(given) < vocab_size:
        raise UserError(f"{request.name}: holds an id outside 0 to {vocab_size - 1}")
    if request.template and (not gaps or min(gaps) < 1):
        raise UserError(f"{request.name}: a template needs gaps, each of at least one token")
    if request.template and request.settings.method == "ar":
        raise UserError(
            f"{request.name}: --decode.method=ar only writes behind what is given; it cannot fill templates"
        )
    if request.length > room:
        fix = "shorten the template" if gaps else "shorten it, lower --decode.max_new_tokens"
        raise UserError(
            f"{request.name}: has {len(given)} tokens, and {request.length - len(given)} new ones do not fit "
            f"{'between' if gaps else 'behind'} them in a cache of {room}: {fix}, or raise --decode.cache_length"
        )
