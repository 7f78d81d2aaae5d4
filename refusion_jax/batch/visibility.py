"""Visibility: attention masks as data, the one definition of masks, kernels and FLOP counts.

A query sees (attends to) a key iff both are in one segment, rank_k <= rank_q, and group_k is 0 or group_q. Causal
attention has rank = index, bidirectional attention rank 0 everywhere. Two documents of two and three tokens in a causal
row (row: query, column: key):

    segment  1 1 2 2 2
    rank     0 1 2 3 4          1 . . . .
    group    0 0 0 0 0          1 1 . . .
                                . . 1 . .
                                . . 1 1 .
                                . . 1 1 1

The mask of [x_t; x_0] for block diffusion (arXiv 2503.09573), with four tokens in blocks of two: noisy block b has rank
2b and group b + 1, clean block b has rank 2b + 1 and group 0:

    rank     0 0 2 2 1 1 3 3    1 1 . . . . . .
    group    1 1 2 2 0 0 0 0    1 1 . . . . . .
                                . . 1 1 1 1 . .
                                . . 1 1 1 1 . .
                                . . . . 1 1 . .
                                . . . . 1 1 . .
                                . . . . 1 1 1 1
                                . . . . 1 1 1 1

Axes: B rows, T row length.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, ArrayLike, Bool, Int32


def sees(rank_q, group_q, rank_k, group_k):
    """The definition within a segment, for numpy or JAX arrays that broadcast."""
    return (rank_k <= rank_q) & ((group_k == 0) | (group_k == group_q))


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Ranks and groups as a function of the index in the row, so that kernels can skip unseen keys statically."""

    def rank_and_group(self, length: int) -> tuple[Int32[np.ndarray, "T"], Int32[np.ndarray, "T"]]:
        """(ranks, groups) of a row of T tokens."""
        raise NotImplementedError

    def dense(
        self, length: int, queries: slice = slice(None), keys: slice = slice(None)
    ) -> Bool[np.ndarray, "queries keys"]:
        """A part of the mask of a row with a single document."""
        rank, group = _cached(self, length)
        rank_q, rank_k, group_k = rank[queries], rank[keys], group[keys]
        if rank_q.max() < rank_k.min():  # most tiles of long rows are all zeros or all ones, which is quick to see
            return np.zeros((len(rank_q), len(rank_k)), bool)
        if rank_k.max() <= rank_q.min() and not group_k.any():
            return np.ones((len(rank_q), len(rank_k)), bool)
        return sees(rank_q[:, None], group[queries, None], rank_k[None], group_k[None])

    def key_range(self, length: int, begin: int, end: int) -> tuple[int, int]:
        """The range of keys that any of the queries begin .. end - 1 sees: (first, last + 1)."""
        rank, group = _cached(self, length)
        mine = group[begin:end]
        seen = (rank <= rank[begin:end].max()) & ((group == 0) | np.isin(group, mine))
        places = np.flatnonzero(seen)
        return int(places[0]), int(places[-1]) + 1

    def keys_seen(self, length: int) -> float:
        """The mean number of keys that a query sees, in a row with a single document."""
        rank, group = _cached(self, length)
        span = int(rank.max()) + 1

        def count(members: slice | np.ndarray, group_of_query: np.ndarray) -> np.ndarray:
            """For every query, the number of keys in a group with a rank up to its own."""
            order = np.sort(group[members].astype(np.int64) * span + rank[members])
            least = group_of_query.astype(np.int64) * span
            return np.searchsorted(order, least + rank, "right") - np.searchsorted(order, least, "left")

        own = np.where(group > 0, count(slice(None), group), 0)
        return float(np.mean(count(group == 0, np.zeros_like(group)) + own))


@functools.lru_cache(maxsize=32)
def _cached(pattern: Pattern, length: int) -> tuple[np.ndarray, np.ndarray]:
    return pattern.rank_and_group(length)


@dataclasses.dataclass(frozen=True)
class BlockCausal(Pattern):
    """Every token sees its own block of `size` places and the blocks before it."""

    size: int

    def rank_and_group(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(length, dtype=np.int32) // self.size, np.zeros(length, np.int32)


@dataclasses.dataclass(frozen=True)
class CausalStreams(Pattern):
    """[x_t; x_0], half a row each, both causal, with x_t in blocks of `size` places.

    A clean token sees the clean tokens up to itself. A noisy token sees those of its block up to itself, and the clean
    tokens of all earlier blocks.
    """

    size: int

    def rank_and_group(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        index = np.arange(length // 2, dtype=np.int32)
        offset = index % self.size
        rank = np.concatenate([(index - offset) * self.size + offset, (index + 1) * self.size])
        return rank.astype(np.int32), np.concatenate([index // self.size + 1, 0 * index]).astype(np.int32)


# Blocks of one token, and one block that no row exceeds: every token sees every token.
CAUSAL, BIDIRECTIONAL = BlockCausal(1), BlockCausal(1 << 30)


@struct.dataclass
class Visibility:
    """Which tokens see which in a batch. `pattern` is set if ranks and groups follow one, for kernels to use."""

    segment_ids: Int32[ArrayLike, "B T"]  # the document of each token; 0 is padding
    rank: Int32[ArrayLike, "B T"]
    group: Int32[ArrayLike, "B T"]
    pattern: Pattern | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def of(cls, pattern: Pattern, segment_ids: Int32[ArrayLike, "B T"]) -> "Visibility":
        """The visibility of packed rows by a pattern, within each document."""
        rank, group = (jnp.broadcast_to(x, segment_ids.shape) for x in _cached(pattern, segment_ids.shape[1]))
        return cls(segment_ids, rank, group, pattern)

    def mask(self, queries: slice = slice(None), keys: slice = slice(None)) -> Bool[Array, "B queries keys"]:
        """A part of the dense mask."""
        segment_q, rank_q, group_q = (x[:, queries, None] for x in (self.segment_ids, self.rank, self.group))
        segment_k, rank_k, group_k = (x[:, None, keys] for x in (self.segment_ids, self.rank, self.group))
        return (segment_q == segment_k) & sees(rank_q, group_q, rank_k, group_k)
