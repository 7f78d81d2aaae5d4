"""Counts on the device what the forwards of the decoding loop feed, without further host-device synchronization.

A decoder whose forwards vary in size has two methods for this, which are called only while a run is recorded:

    shapes(model, rows) -> the forwards that are compiled for a batch of this size, on the mesh of `jax.set_mesh`
    fed(model, state)   -> what the next forward of this state feeds

Any other decoder is taken to feed its whole width for every active row, on top of all that the row has committed. A
decoder with a prefill has an attribute `chunk`: the tokens a row that one forward of the prefill takes.

Axes: B rows, J shapes, L = B + 1 numbers of active rows, W numbers of tokens a row, P parts of the cache.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from refusion_jax.decoding.decoder import Decoder
from refusion_jax.distributed.sharding import shard_count_here
from refusion_jax.model.transformer import Transformer

_PARTS = 64  # bins, at most, for the number of cache entries that a row reads


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of a compiled forward: its places for tokens come in tiles, each for tokens of one row."""

    width: int  # places a row, at most
    tile: int  # places a tile
    tiles: int  # a shard

    @property
    def places(self) -> int:
        """Places of a shard."""
        return self.tile * self.tiles


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fed:
    """What one forward feeds."""

    shape: Int32[Array, ""]  # index of its shape
    tokens: Int32[Array, "B"]  # of each row; 0 for rows that take no part
    cached: Int32[Array, "B"]  # cache entries that the tokens of each row attend to


def shapes(decoder: Decoder, model: Transformer, rows: int) -> tuple[Shape, ...]:
    """The forwards that are compiled for a batch of this many rows."""
    if hasattr(decoder, "shapes"):
        return decoder.shapes(model, rows)
    return (Shape(decoder.width, decoder.width, rows // shard_count_here("batch")),)


def fed(decoder: Decoder, model: Transformer, state: Any) -> Fed:
    """What the next forward of a state feeds."""
    if hasattr(decoder, "fed"):
        return decoder.fed(model, state)
    tokens = jnp.where(state.active, decoder.width, 0)
    return Fed(jnp.int32(0), tokens, state.cache.length if hasattr(state, "cache") else jnp.zeros_like(tokens))


def part_size(cache_length: int) -> int:
    """Cache entries a part."""
    return max(1, -(-cache_length // _PARTS))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counts:
    """How often each forward ran, and what its rows fed."""

    forwards: Int32[Array, "J L"]  # by shape and active rows
    feeds: Int32[Array, "W P"]  # of a row in a forward, by its tokens and the last part of the cache it reads

    @classmethod
    def none(cls, decoder: Decoder, of: tuple[Shape, ...], rows: int) -> "Counts":
        """All zeros.

        Args:
          decoder: its cache length sets the number of parts.
          of: from `shapes`.
          rows: of the batch.
        """
        parts = decoder.cache_length // part_size(decoder.cache_length) + 1
        widest = max(shape.width for shape in of)
        return cls(jnp.zeros((len(of), rows + 1), jnp.int32), jnp.zeros((widest + 1, parts), jnp.int32))

    def plus(self, forward: Fed, cache_length: int) -> "Counts":
        """With one more forward, of a decoder with this cache length."""
        live = (forward.tokens > 0).astype(jnp.int32)
        part = forward.cached // part_size(cache_length)
        return Counts(
            self.forwards.at[forward.shape, jnp.sum(live)].add(1), self.feeds.at[forward.tokens, part].add(live)
        )
