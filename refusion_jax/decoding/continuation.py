"""Base classes of decoders that continue a prompt on a cache: compiled sizes, and the state of the decoding loop.

Unless they say otherwise, such decoders only append to what is given: they do not see the text after a gap. Each has a
subclass of `Continuer`, with the width of its forwards and its own `init` and `step`, and, where it carries more state,
one of `Continuation`.

Axes: B rows, T tokens, C cache entries.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int32, PyTree

from refusion_jax.batch.rows import row_index
from refusion_jax.decoding import cache as kv
from refusion_jax.decoding.decoder import Decoder, RowState
from refusion_jax.decoding.requests import Request, text_capacity
from refusion_jax.decoding.sampling import put, select
from refusion_jax.decoding.settings import Settings, TokenIds
from refusion_jax.model.shape import ModelConfig
from refusion_jax.model.transformer import Transformer


@struct.dataclass
class Continuation(RowState):
    """The state of the decoding loop; decoders that need more fields subclass it."""

    cache: kv.Cache

    def commit(
        self,
        cache: kv.Cache,
        tokens: Int32[Array, "B T"],
        places: Int32[Array, "B T"],
        count: Int32[Array, "B"],
        eos_id: int,
    ) -> tuple["Continuation", Int32[Array, "B"]]:
        """Commits the first `count` of these tokens, up to an EOS and the last place: (the next state, their number).

        As many entries of the cache, which the forward has written, are committed.
        """
        count = jnp.where(self.active, jnp.minimum(count, self.places.count - self.record.count), 0)
        ends = (tokens == eos_id) & (jnp.arange(tokens.shape[1])[None] < count[:, None])
        has_end = jnp.any(ends, axis=1)
        count = jnp.where(has_end, jnp.argmax(ends, axis=1) + 1, count)
        record = self.record.append(tokens, places, count)
        after = self.replace(
            cache=kv.commit(cache, count),
            record=record,
            active=self.active & ~has_end & (record.count < self.places.count),
            forwards=self.forwards + self.active,
        )
        return after, count

    def renewed(self, after: "Continuation", **new: PyTree) -> "Continuation":
        """The state `after` a forward pass, with new values of some fields in the rows that were active before it."""
        return after.replace(**select(self.active, new, {name: getattr(self, name) for name in new}))


@struct.dataclass
class FilledText(Continuation):
    """The state of decoders that fill the masks of a text."""

    text: Int32[Array, "B C"]  # the mask token wherever nothing is filled
    length: Int32[Array, "B"]  # at most; where an EOS is filled, the text ends there

    def masks(self, mask_id: int) -> Bool[Array, "B C"]:
        """The places that are still to be filled; a prompt may hold mask tokens as well."""
        index = row_index(self.text)
        return (self.text == mask_id) & (index >= self.places.position[:, :1]) & (index < self.length[:, None])

    def fill(
        self,
        cache: kv.Cache,
        is_new: Bool[Array, "B T"],
        tokens: Int32[Array, "B T"],
        places: Int32[Array, "B T"],
        ids: TokenIds,
        **own: Any,
    ) -> "FilledText":
        """The state after a forward pass of active rows that fills new tokens, up to the first EOS among them."""
        is_new &= self.active[:, None]
        length = jnp.min(jnp.where(is_new & (tokens == ids.eos_id), places + 1, self.length[:, None]), axis=1)
        is_new &= places < length[:, None]
        after = self.replace(
            cache=cache,
            record=self.record.append_where(is_new, tokens, places),
            text=put(self.text, jnp.where(is_new, places, self.text.shape[1]), tokens),
            length=length,
            forwards=self.forwards + self.active,
            **own,
        )
        return after.replace(active=self.active & jnp.any(after.masks(ids.mask_id), axis=1))


class Continuer(Decoder):
    """A decoder's compiled sizes."""

    settings: ClassVar[type[Settings]] = Settings
    copies_prefix: ClassVar[bool] = True
    fills_gaps: ClassVar[bool] = False

    @classmethod
    def for_requests(cls, requests: Sequence[Request], model: ModelConfig) -> Self:
        width = cls.width_for(requests)
        return cls.sized(requests, model, width=width, cache_length=text_capacity(requests) + width)

    @classmethod
    def width_for(cls, requests: Sequence[Request]) -> int:
        """Tokens of a row in one forward pass that serve these requests."""
        raise NotImplementedError

    def scored(self, model: Transformer, rows: int) -> int:
        return super().scored(model, rows) * min(self.width, self.new_tokens) // self.width
