"""The base of masked decoders, which fill the masks of a text in any order by bidirectional passes over all of it.

Every pass takes a window of the text, its current block, proposes a token for each mask in it, and commits those
that a *selection rule* chooses. Decoders differ in this rule: the most confident, on a schedule (llada.py), near
known tokens (conv.py), by another schedule (dream.py), by a threshold (fast_dllm.py, which also keeps keys and values).

A few widths of the text are compiled, and every forward pass uses the smallest that holds its longest active row.

Axes: B rows, C text length, N places to decode, K places of a window, D hidden size, V vocabulary.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, ArrayLike, Bool, Float32, Int32, Key

from refusion_jax.batch.visibility import BIDIRECTIONAL, Visibility
from refusion_jax.cli.errors import UserError
from refusion_jax.decoding.decoder import Decoder, Proposal, RowState
from refusion_jax.decoding.reference import ReferenceDecoder
from refusion_jax.decoding.requests import Layout, Places, Request, most_new_tokens, text_capacity
from refusion_jax.decoding.sampling import entry, put
from refusion_jax.model.interface import LanguageModel
from refusion_jax.model.shape import ModelConfig

_WIDTHS = 4  # number of compiled widths, at most


class Window(NamedTuple):
    """Consecutive places to decode, in text order, padded."""

    position: Int32[Array, "B K"]  # in the text
    masked: Bool[Array, "B K"]  # in the window and not yet committed


@struct.dataclass
class MaskedText(RowState):
    """A text in which masks are filled; decoders that need more fields subclass it."""

    text: Int32[Array, "B C"]  # the mask token wherever nothing is committed
    length: Int32[Array, "B"]  # of the text

    @property
    def first(self) -> Int32[Array, "B"]:
        """The first place to decode, if no given text comes after a gap."""
        return self.length - self.places.count

    def first_of(self, token: int) -> Int32[Array, "B"]:
        """Index, among the places to decode, of the first one with this token; N if there is none."""
        index = jnp.arange(self.places.position.shape[1])[None]
        tokens = jnp.take_along_axis(self.text, self.places.position, axis=1)
        found = (tokens == token) & (index < self.places.count[:, None])
        return jnp.min(jnp.where(found, index, index.shape[1]), axis=1)

    @property
    def block_length(self) -> Int32[Array, "B"]:
        """Block length of each row; all that it decodes if the setting is 0 or missing."""
        own = getattr(self.settings, "block_length", 0)
        return jnp.where(own > 0, own, self.places.count)

    @property
    def block_start(self) -> Int32[Array, "B"]:
        """Index, among the places to decode, of the start of the current block, that of the first mask."""
        first = self.first_of(self.ids.mask_id)
        return first - first % jnp.maximum(self.block_length, 1)

    def window(self, size: int, first: Int32[Array, "B"], length: Int32[Array, "B"]) -> Window:
        """The window of places first .. first + length - 1, padded to K = size."""
        places, offset = self.places, jnp.arange(size)[None]
        at = first[:, None] + offset
        is_in = (offset < length[:, None]) & (at < places.count[:, None])
        at = jnp.minimum(at, places.position.shape[1] - 1)
        position = jnp.take_along_axis(places.position, at, axis=1)
        return Window(position, is_in & (jnp.take_along_axis(self.text, position, axis=1) == self.ids.mask_id))

    def commit(self, w: Window, tokens: Int32[Array, "B K"], chosen: Bool[Array, "B K"]) -> "MaskedText":
        """The state after some masks of a window are committed; rows whose answers are complete become inactive.

        `chosen` places that are not masked are ignored.
        """
        chosen = chosen & w.masked
        after = self.replace(
            text=put(self.text, jnp.where(chosen, w.position, self.text.shape[1]), tokens),
            record=self.record.append_where(chosen, tokens, w.position),
            forwards=self.forwards + 1,
        )
        # An answer without masks, or without masks before its first EOS, is final.
        return after.replace(active=after.first_of(self.ids.mask_id) < after.first_of(self.ids.eos_id))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedDecoder(Decoder):
    """The base of masked decoders; the width is C, the length of the longest text."""

    block_length: int  # K, the longest block
    shifted: bool  # whether the token at j is read from the logits at j - 1

    @classmethod
    def for_requests(cls, requests: Sequence[Request], model: ModelConfig) -> Self:
        if model.shifted:
            check_first(requests)
        N, C = most_new_tokens(requests), text_capacity(requests)
        block_length = min(N, max(r.settings.block_length or N for r in requests))
        return cls.sized(requests, model, width=C, block_length=block_length, shifted=model.shifted)

    def init(self, _: LanguageModel, layout: Layout, keys: Key[Array, "B"]) -> MaskedText:
        return self.start_text(MaskedText, layout, keys, self.block_length)

    def scored(self, model: LanguageModel, rows: int) -> int:
        return super().scored(model, rows) * self.block_length // self.width

    def step(self, model: LanguageModel, s: MaskedText) -> MaskedText:
        """One forward pass over the whole text, which commits masks of each row's block."""
        w = s.window(self.block_length, s.block_start, s.block_length)
        logits = denoise(model, s, w.position, self.shifted, self.fed(s))
        proposal = s.propose(logits, w.position, w.masked)
        return s.commit(w, proposal.token, self.chosen(s, w, proposal))

    @abc.abstractmethod
    def chosen(self, s: MaskedText, w: Window, proposal: Proposal) -> Bool[Array, "B K"]:
        """The selection rule: which places of the window to commit; places that are not masked are ignored."""

    def fed(self, s: MaskedText) -> Bool[Array, "B C"] | None:
        """Which places of the text are fed; None: all."""


@struct.dataclass
class ScheduledPlaces(Places):
    """The places to decode, and how many of them each forward pass commits."""

    counts: Int32[ArrayLike, "R N"]


class OnSchedule(MaskedDecoder):
    """A masked decoder whose passes commit the most confident masks of the block, as many as a schedule says."""

    @classmethod
    def counts(cls, request: Request) -> Sequence[int]:
        """How many masks each pass commits; here `steps` are split evenly over blocks, and masks over a block's steps.

        With steps=0 each forward pass commits one mask.
        """
        n, s = most_new_tokens([request]), request.settings
        length = s.block_length or n
        blocks = [min(length, n - first) for first in range(0, n, length)]
        steps = max(s.steps // len(blocks), 1) if s.steps else length
        return [count for size in blocks for count in evenly(size, steps)]

    def lay_out(self, requests: Sequence[Request]) -> Layout:
        layout, N = super().lay_out(requests), self.new_tokens
        counts = [[*own, *[0] * (N - len(own))] for own in map(self.counts, requests)]
        return layout.replace(places=ScheduledPlaces(**vars(layout.places), counts=np.array(counts, np.int32)))

    def confidence_of(self, s: MaskedText, w: Window, proposal: Proposal) -> Float32[Array, "B K"]:
        """Places with higher confidence are committed earlier."""
        return proposal.probability

    def chosen(self, s: MaskedText, w: Window, proposal: Proposal) -> Bool[Array, "B K"]:
        """The most confident masks, as many as this pass commits; ties in text order."""
        counts, confidence = s.places.counts, jnp.where(w.masked, self.confidence_of(s, w, proposal), -jnp.inf)
        rank = jnp.argsort(jnp.argsort(-confidence, axis=1, stable=True), axis=1, stable=True)
        return rank < entry(counts, jnp.minimum(s.forwards, counts.shape[1] - 1))[:, None]


def evenly(masks: int, steps: int) -> list[int]:
    """How many masks each step commits: at least one, so fewer steps if masks are few; one more in the first steps."""
    steps = min(steps, masks)
    return [masks // steps + (step < masks % steps) for step in range(steps)]


def check_first(requests: Sequence[Request]) -> None:
    """Raises UserError for texts that begin with a gap: a shifted model cannot predict their first token."""
    for request in requests:
        if min(start for start, _ in request.gaps) == 0:
            raise UserError(
                f"{request.name}: begins with a gap, and this model reads a token from the one before it; give at "
                f"least one token first"
            )


def widths(capacity: int, least: int = 0) -> list[int]:
    """The widths that are compiled: C / 4, C / 2, 3 C / 4 and C, in ascending order, but at least `least`.

    No text is shorter than its answer, N, so whole texts need no less.
    """
    return sorted({max(least, -(-capacity * i // _WIDTHS)) for i in range(1, _WIDTHS + 1)})


def in_smallest(count: Int32[Array, "B"], of: list[int], forward: Callable[[int], Any]) -> Any:
    """Calls `forward` with the smallest of these widths that holds the tokens of every row."""
    smallest = jnp.argmax(jnp.max(count) <= jnp.array(of)).astype(jnp.int32)
    return jax.lax.switch(smallest, [functools.partial(forward, width) for width in of])


def denoise(
    model: LanguageModel,
    s: MaskedText,
    position: Int32[Array, "B K"],
    shifted: bool,
    is_fed: Bool[Array, "B C"] | None = None,
) -> Float32[Array, "B K V"]:
    """One forward pass over the text: logits for the given positions; those of finished rows are undefined.

    If shifted, the token at j is read from the logits at j - 1. By default the whole text is fed; `is_fed` must be
    False in finished rows.
    """
    (B, C), N = s.text.shape, s.places.position.shape[1]
    at = jnp.maximum(position - shifted, 0)  # if shifted, place 0 is never decoded: see `check_first`
    if is_fed is None:
        fed = jnp.broadcast_to(jnp.arange(C)[None], (B, C))
        length, widest, sizes = s.length, jnp.where(s.active, s.length, 0), widths(C, N)
    else:
        fed = jnp.argsort(~is_fed, axis=1, stable=True)  # fed places first, in text order
        at = jnp.take_along_axis(jnp.cumsum(is_fed, axis=1) - is_fed, at, axis=1)  # as fed
        length = widest = jnp.sum(is_fed, axis=1)
        sizes = widths(C)

    def forward(width: int):
        tokens = jnp.take_along_axis(s.text, fed[:, :width], axis=1)
        seen = Visibility.of(BIDIRECTIONAL, (jnp.arange(width)[None] < length[:, None]).astype(jnp.int32))
        hidden = model.hidden(tokens, fed[:, :width], seen)
        return jnp.take_along_axis(hidden, jnp.minimum(at, width - 1)[:, :, None], axis=1)

    return model.logits(in_smallest(widest, sizes, forward))


def fill(
    plain: ReferenceDecoder,
    counts: Iterable[int],
    score: Callable[[Float32[np.ndarray, "V"], int], float],
    places: list[int],
    shift: int = 0,
    fed: list[int] | None = None,
) -> None:
    """Fills places in plain Python: the i-th forward pass commits the `counts[i]` masks with the highest scores.

    `score` takes the probabilities [V] of a mask's token, which are read `shift` places before the mask, and its place.
    By default all places are fed. Returns once the text is complete.
    """
    for count in counts:
        p = plain.denoise("denoise", fed)
        rows = {place: p[place - shift] for place in places if place not in plain.text}
        chosen = plain.first({place: score(row, place) for place, row in rows.items()}, count)
        plain.text |= {place: plain.best(rows[place], place) for place in chosen}
        if plain.is_complete():
            return
