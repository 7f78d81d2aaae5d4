"""The slots of a request: their places in its text, their order, and their division into serial blocks.

Axes: R requests, B rows, N slots of a row, M slots of a block.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, ArrayLike, Int32

from refusion_jax.decoding.requests import Request
from refusion_jax.systems.refusion.settings import LEFT_TO_RIGHT, RANDOM

BY_CONFIDENCE = -1  # the rank of all slots if the plan orders them by confidence


@struct.dataclass
class Block:
    """Some slots of each row: all, or those of a serial block."""

    start: Int32[ArrayLike, "R N"]  # position of each slot's first token in the text
    size: Int32[ArrayLike, "R N"]  # its tokens: slot_size, or fewer in the last slot of a gap; 0 where there is no slot
    rank: Int32[ArrayLike, "R N"]  # a slot's place in the order, see `ranks`
    ends_from: Int32[ArrayLike, "R"]  # the first position of the text at which an EOS may be written


@struct.dataclass
class Canvas(Block):
    """The slots of each row."""

    per_block: Int32[ArrayLike, "R"]  # slots of a serial block

    @classmethod
    def of(cls, requests: Sequence[Request], most: int) -> "Canvas":
        start, size = np.zeros((2, len(requests), most), np.int32)
        rank = np.full(start.shape, BY_CONFIDENCE, np.int32)
        for row, request in enumerate(requests):
            slots = slots_of(request)
            n = len(slots)
            start[row, :n], size[row, :n] = [slot.start for slot in slots], [len(slot) for slot in slots]
            rank[row, :n] = ranks(request)
        of_rows = [(request.ends_from, slots_a_block(request)) for request in requests]
        return cls(start, size, rank, *np.array(of_rows, np.int32).T)

    def block(self, index: Int32[Array, "B"], slots: int) -> Block:
        """The M = slots slots of serial block `index` of each row; empty after the last block."""
        slot, N = jnp.arange(slots)[None], self.size.shape[1]
        at = index[:, None] * self.per_block[:, None] + slot
        exists = (slot < self.per_block[:, None]) & (at < N)
        start, size, rank = (
            jnp.take_along_axis(x, jnp.minimum(at, N - 1), axis=1) for x in (self.start, self.size, self.rank)
        )
        return Block(start, jnp.where(exists, size, 0), rank, self.ends_from)


def slots_of(request: Request) -> list[range]:
    """The places of each slot of a request. Each gap is cut into slots, of which the last may be short."""
    K = request.settings.slot_size
    return [range(i, min(i + K, at + length)) for at, length in request.gaps for i in range(at, at + length, K)]


def ranks(request: Request) -> list[int]:
    """The rank of each slot in the order, 0 first; BY_CONFIDENCE for all if the plan decides.

    A random order is a function of the seed and the request's noise.
    """
    s, n = request.settings, len(slots_of(request))
    if s.order == RANDOM:
        return np.random.default_rng((s.seed, request.noise)).permutation(n).tolist()
    return list(range(n)) if s.order == LEFT_TO_RIGHT else [BY_CONFIDENCE] * n


def slots_a_block(request: Request) -> int:
    """Number of slots in a serial block of a request."""
    return -(-len(slots_of(request)) // request.settings.serial_blocks)
