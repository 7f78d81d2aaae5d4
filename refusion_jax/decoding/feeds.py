"""What the forwards of the decoding loop feed, counted on the device: no host-device synchronization is added.

A decoder whose forwards differ says so by two methods, which are asked for only where somebody wants to know:

    shapes(model, rows) -> the forwards that are compiled for a batch of so many rows, on the mesh of `jax.set_mesh`
    fed(model, state)   -> what the forward that a state is about to take feeds

Of any other decoder every live row is taken to feed the decoder's whole width, on top of all that it has committed.
One that reads what is given before its first forward has a `chunk`: the tokens that one forward of that prefill takes.

Axes: B rows, J shapes, L = B + 1 numbers of live rows, W numbers of tokens of a row, P parts of the cache.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from refusion_jax.decoding.decoder import Decoder
from refusion_jax.model.transformer import Transformer
from refusion_jax.runtime.sharding import shard_count_here

_PARTS = 64  # of the cache, at most: by so many lengths that are read the feeds of rows are told apart


@dataclasses.dataclass(frozen=True)
class Shape:
    """One forward that is compiled."""

    width: int  # places of a row, at most
    tile: int  # places that stand together, all of them of one row
    tiles: int  # of a shard

    @property
    def places(self) -> int:
        """Of a shard."""
        return self.tile * self.tiles


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fed:
    """What one forward feeds."""

    shape: Int32[Array, ""]  # index of the one it runs in
    tokens: Int32[Array, "B"]  # of each row; 0 for one that takes no part
    cached: Int32[Array, "B"]  # entries of the cache that its tokens see


def shapes(decoder: Decoder, model: Transformer, rows: int) -> tuple[Shape, ...]:
    """The forwards that are compiled for a batch of so many rows."""
    if hasattr(decoder, "shapes"):
        return decoder.shapes(model, rows)
    return (Shape(decoder.width, decoder.width, rows // shard_count_here("batch")),)


def fed(decoder: Decoder, model: Transformer, state: Any) -> Fed:
    """What the forward that a state is about to take feeds."""
    if hasattr(decoder, "fed"):
        return decoder.fed(model, state)
    tokens = jnp.where(state.active, decoder.width, 0)
    return Fed(jnp.int32(0), tokens, state.cache.length if hasattr(state, "cache") else jnp.zeros_like(tokens))


def part_size(cache_length: int) -> int:
    """Entries of a part of the cache."""
    return max(1, -(-cache_length // _PARTS))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counts:
    """How often each forward ran, and what its rows fed."""

    forwards: Int32[Array, "J L"]  # by shape and live rows
    feeds: Int32[Array, "W P"]  # by tokens of a live row and part of the cache that its entries end in

    @classmethod
    def none(cls, decoder: Decoder, of: tuple[Shape, ...], rows: int) -> "Counts":
        """Of no forward yet, as arrays of zeros.

        Args:
          decoder: whose cache is told apart by parts.
          of: from `shapes`.
          rows: of the batch.
        """
        parts = decoder.cache_length // part_size(decoder.cache_length) + 1
        widest = max(shape.width for shape in of)
        return cls(jnp.zeros((len(of), rows + 1), jnp.int32), jnp.zeros((widest + 1, parts), jnp.int32))

    def plus(self, forward: Fed, cache_length: int) -> "Counts":
        """With one forward more, of a decoder whose cache has so many entries."""
        live = (forward.tokens > 0).astype(jnp.int32)
        part = forward.cached // part_size(cache_length)
        return Counts(
            self.forwards.at[forward.shape, jnp.sum(live)].add(1), self.feeds.at[forward.tokens, part].add(live)
        )
