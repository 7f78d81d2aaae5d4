"""One token per forward from a slot-diffusion model, in text order.

The first token of a slot is predicted by a mask token at its place, the others by the token before them. This is the
baseline for speed, and a check of the cache. A forward feeds the last token, whose keys and values are not committed
yet, and a mask token, which is used at the start of a slot.

Axes: B rows, K slot size.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Key

from refusion_jax.decoding import cache as kv
from refusion_jax.decoding.decoder import Decoder
from refusion_jax.decoding.requests import Request, prefill_chunk, text_capacity
from refusion_jax.decoding.sampling import Record, mask_logits, sample
from refusion_jax.decoding.settings import TokenIds, TracedSettings
from refusion_jax.model.transformer import ModelConfig, Transformer
from refusion_jax.systems.refusion.canvas import Canvas, SlotLayout, slots_of
from refusion_jax.systems.refusion.settings import SequentialSettings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The state of the decoding loop."""

    cache: kv.Cache
    record: Record
    canvas: Canvas
    keys: Key[Array, "B"]
    settings: TracedSettings
    last: Int32[Array, "B"]  # the last token, which is not in the cache yet unless it was given
    slot: Int32[Array, "B"]  # slot of the next token
    offset: Int32[Array, "B"]  # place of the next token in its slot
    active: Bool[Array, "B"]
    forwards: Int32[Array, "B"]

    @property
    def rounds(self) -> Int32[Array, "B"]:
        """Every forward counts as a round."""
        return self.forwards


@dataclasses.dataclass(frozen=True)
class Sequential(Decoder):
    """The decoder with its compiled sizes."""

    settings: ClassVar[type[SequentialSettings]] = SequentialSettings
    copies_prefix: ClassVar[bool] = True
    width: ClassVar[int] = 2  # the last token and a mask token

    ids: TokenIds
    slot_size: int  # K
    slots: int  # at most, in a row
    cache_length: int
    chunk: int  # given tokens per forward of the prefill

    @classmethod
    def for_requests(cls, requests: Sequence[Request], model: ModelConfig) -> Self:
        """The smallest sizes that serve all of these requests."""
        return cls(
            ids=TokenIds.of(requests[0].settings, model),
            slot_size=requests[0].settings.slot_size,
            slots=max(len(slots_of(request)[0]) for request in requests),
            cache_length=text_capacity(requests) + cls.width,
            chunk=prefill_chunk(requests),
        )

    def lay_out(self, requests: Sequence[Request]) -> SlotLayout:
        """Given tokens, slots and settings of some requests."""
        return SlotLayout.of(requests, self.cache_length, self.slots)

    def init(self, model: Transformer, layout: SlotLayout, keys: Key[Array, "B"]) -> State:
        """The initial state, after the prefill."""
        given = layout.given
        zeros = jnp.zeros_like(given.length)
        return State(
            cache=kv.prefill(model, given, self.chunk),
            record=Record.empty(len(zeros), self.slots * self.slot_size + self.width),
            canvas=layout.canvas,
            keys=keys,
            settings=layout.settings,
            last=jnp.take_along_axis(given.tokens, given.length[:, None] - 1, axis=1)[:, 0],
            slot=zeros,
            offset=zeros,
            active=zeros == 0,
            forwards=zeros,
        )

    def step(self, model: Transformer, s: State) -> State:
        """One forward, one token per row."""
        start, size, may_end = (
            jnp.take_along_axis(x, s.slot[:, None], axis=1)[:, 0]
            for x in (s.canvas.start, s.canvas.size, s.canvas.may_end)
        )
        from_mask = s.offset == 0
        last_is_new = s.record.count > 0  # otherwise it was given and is already in the cache
        newest = jnp.maximum(s.record.count - 1, 0)[:, None]
        last_position = jnp.take_along_axis(s.record.positions, newest, axis=1)[:, 0]
        place = start + s.offset

        tokens = jnp.stack([s.last, jnp.full_like(s.last, self.ids.mask_id)], axis=1)
        positions = jnp.stack([jnp.where(last_is_new, last_position, place - 1), place], axis=1)
        sees_last = last_is_new[:, None, None] & jnp.array([[[True, False], [True, False]]])
        visible = sees_last | jnp.array([[[False, False], [False, True]]])
        logits, cache = kv.extend(model, s.cache, tokens, positions, visible)

        chosen = jnp.where(from_mask[:, None], logits[:, 1], logits[:, 0])[:, None]  # [B, 1, V]
        _, choosable = mask_logits(chosen, may_end[:, None], self.ids)
        token = sample(choosable, jnp.ones_like(may_end)[:, None], s.keys, place[:, None], s.settings)[:, 0]
        count = s.active.astype(jnp.int32)
        offset = s.offset + count
        slot = s.slot + (offset == size)
        sizes = jnp.take_along_axis(s.canvas.size, jnp.minimum(slot, self.slots - 1)[:, None], axis=1)[:, 0]
        is_last = (slot == self.slots) | (sizes == 0)
        return dataclasses.replace(
            s,
            cache=kv.commit(cache, jnp.where(last_is_new, count, 0)),
            record=s.record.append(token[:, None], place[:, None], count),
            last=jnp.where(s.active, token, s.last),
            slot=jnp.where(is_last, s.slot, slot),
            offset=jnp.where(offset == size, 0, offset),
            active=s.active & (token != self.ids.eos_id) & ~is_last,
            forwards=s.forwards + count,
        )
