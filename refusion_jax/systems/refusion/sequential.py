"""One token per forward from a slot-diffusion model, in text order.

The first token of a slot is predicted by a mask token at its place, the others by the token before them. This is the
baseline for speed, and a check of the cache. Each forward pass takes the last token, whose keys and values are not
committed yet, and a mask token, which is used at the start of a slot.

Axes: B rows, N places to decode.
"""

from collections.abc import Sequence
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, ArrayLike, Bool, Int32, Key

from refusion_jax.decoding import cache as kv
from refusion_jax.decoding.decoder import SLOT_MASK, Continuation, Continuer
from refusion_jax.decoding.requests import Layout, Places, Request
from refusion_jax.decoding.sampling import entry
from refusion_jax.model.interface import LanguageModel
from refusion_jax.systems.refusion.canvas import slots_of
from refusion_jax.systems.refusion.settings import SequentialSettings


@struct.dataclass
class SlotPlaces(Places):
    """The places to decode, with slots."""

    begins: Bool[ArrayLike, "R N"]  # whether a place is the first of a slot


@struct.dataclass
class SequentialState(Continuation):
    """A cached text and its last token."""

    last: Int32[Array, "B"]  # the last token, not in the cache yet
    last_place: Int32[Array, "B"]  # its position in the text


class Sequential(Continuer):
    """Commits one token per forward, in text order."""

    settings: ClassVar[type[SequentialSettings]] = SequentialSettings
    fills_gaps: ClassVar[bool] = True
    next_token: ClassVar[str] = SLOT_MASK

    @classmethod
    def width_for(cls, requests: Sequence[Request]) -> int:
        """The last token and a mask token."""
        return 2

    def lay_out(self, requests: Sequence[Request]) -> Layout:
        layout = super().lay_out(requests)
        starts = [[slot.start for slot in slots_of(request)] for request in requests]
        begins = [np.isin(row, own) for row, own in zip(layout.places.position, starts, strict=True)]
        return layout.replace(places=SlotPlaces(**vars(layout.places), begins=np.stack(begins)))

    def init(self, model: LanguageModel, layout: Layout, keys: Key[Array, "B"]) -> SequentialState:
        cache, last = kv.prefill_but_last(model, layout.given, self.chunk)
        at = entry(layout.given.positions, cache.length)
        return self.start(SequentialState, layout, keys, cache=cache, last=last, last_place=at)

    def step(self, model: LanguageModel, s: SequentialState) -> SequentialState:
        next_one = jnp.minimum(s.record.count, self.new_tokens - 1)
        place, from_mask = entry(s.places.position, next_one), entry(s.places.begins, next_one)
        tokens = jnp.stack([s.last, jnp.full_like(s.last, self.ids.mask_id)], axis=1)
        logits, cache = kv.extend(model, s.cache, tokens, jnp.stack([s.last_place, place], axis=1))

        chosen = jnp.where(from_mask[:, None], logits[:, 1], logits[:, 0])[:, None]  # [B, 1, V]
        token = s.sampled(chosen, place[:, None])
        after, _ = s.commit(cache, token, place[:, None], jnp.ones_like(s.last))
        return after.replace(last=token[:, 0], last_place=place)
