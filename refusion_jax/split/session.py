"""What the server keeps for a device: the caches of the server's layers, and the number of its last message.

Messages are processed in the order of their numbers. One that arrives again is not processed again, but answered from
memory.
"""

import dataclasses
import functools
import socket
import threading
from collections.abc import Callable

import jax
import numpy as np

from refusion_jax.cli.errors import UserError
from refusion_jax.model.key_values import KeyValues
from refusion_jax.split import frames
from refusion_jax.split.batching import Batches, ForwardJob
from refusion_jax.split.codec import Codec
from refusion_jax.split.model import Packing, Upper

_MOST_TOKENS = 1 << 20  # places of a forward pass


@dataclasses.dataclass(eq=False)
class DeviceSession:
    """The state of a device, which outlives its connection."""

    upper: Upper
    codec: Codec
    batches: Batches
    reserve: Callable[["DeviceSession", int], None]  # reserves bytes for caches, or refuses them
    last: int = 0  # number of the last processed message
    result: frames.Result | None = None  # of the last forward pass whose result was wanted
    batch: KeyValues | None = None
    new: KeyValues | None = None  # caches of rows that are being filled
    rows: int = 0
    capacity: int = 0
    cache_bytes: int = 0  # of the batch, and as much for rows that are being filled
    connection: socket.socket | None = None
    left_at: float = 0.0  # when its last connection ended
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def deal(self, message: frames.Message) -> frames.Result | None:
        """Processes a message and returns its result, if wanted. UserError for an invalid one, or without memory."""
        deals = {
            frames.Start: self._start, frames.Admit: self._admit, frames.Place: self._place,
            frames.Forward: self._forward,
        }  # fmt: skip
        if type(message) not in deals:
            raise UserError("no message of a device")
        if message.number > self.last:
            if message.number != self.last + 1:
                raise UserError(f"message {message.number} after {self.last}")
            deals[type(message)](message)
            self.last = message.number
        is_wanted = isinstance(message, frames.Forward) and message.wanted
        return self.result if is_wanted and self.result and self.result.number == message.number else None

    def _start(self, message: frames.Start) -> None:
        self.reserve(self, 2 * self.upper.cache_bytes(message.rows, message.capacity))
        self.rows, self.capacity = message.rows, message.capacity
        self.batch, self.new = self.upper.empty_cache(message.rows, message.capacity), None

    def _admit(self, message: frames.Admit) -> None:
        if message.rows > self.rows:  # there is memory for no more
            raise UserError("more rows than the batch has")
        self.new = self.upper.empty_cache(message.rows, self.capacity)

    def _place(self, message: frames.Place) -> None:
        rows = _numbers(message.rows, _rows_of(self.new), _MOST_TOKENS)
        self.batch, self.new = _put(self.batch, self.new, rows), None

    def _forward(self, message: frames.Forward) -> None:
        """Writes the keys and values of the fed tokens; the result is the inputs of the output head for them."""
        cache = self.batch if self.new is None else self.new
        packing, arrays, is_fed = self._read(message, _rows_of(cache))
        x, cache = self.batches.run(ForwardJob(self.upper, packing, cache, arrays))
        if self.new is None:
            self.batch = cache
        else:
            self.new = cache
        if message.wanted:
            self.result = frames.Result(message.number, self.codec.encode(x[is_fed]))

    def _read(self, message: frames.Forward, B: int) -> tuple[Packing, tuple[np.ndarray, ...], np.ndarray]:
        """(packing, arrays for `Upper`, which places are fed, [B, T]) of a forward pass of B rows."""
        T, D, dtype = message.width, self.upper.hidden_size, self.upper.dtype
        packing = Packing(B, T, message.shards, message.tile, message.tiles)
        if max(B * T, packing.shards * packing.tile * packing.tiles) > _MOST_TOKENS:
            raise UserError("a forward pass of too many tokens")
        fed, length = (_numbers(x, B, most) for x, most in ((message.fed, T), (message.length, self.capacity)))
        tiles = -(-fed // packing.tile)
        if np.any(tiles.reshape(packing.shards, -1).sum(axis=1) > packing.tiles):
            raise UserError("tokens that the packing has no place for")
        is_fed = np.arange(T)[None] < fed[:, None]
        x, positions = np.zeros((B, T, D), dtype), np.zeros((B, T), np.int32)
        positions[is_fed] = _numbers(message.positions, is_fed.sum(), 1 << 28)
        x[is_fed] = self.codec.decode(message.tokens, is_fed.sum(), D, dtype)
        visible = np.broadcast_to(np.tri(T, dtype=bool), (B, T, T))
        if message.visible:
            if len(message.visible) != -(-B * T * T // 8):
                raise UserError("a mask of another size")
            visible = np.unpackbits(np.frombuffer(message.visible, np.uint8), count=B * T * T) > 0
        return packing, (x, positions, visible.reshape(B, T, T), length, fed), is_fed


def _rows_of(cache: KeyValues) -> int:
    return jax.tree.leaves(cache)[0].shape[1]


@functools.partial(jax.jit, donate_argnums=0)
def _put(batch: KeyValues, new: KeyValues, rows: jax.Array) -> KeyValues:
    return jax.tree.map(lambda all, own: all.at[:, rows].set(own, mode="drop"), batch, new)


def _numbers(content: bytes, count: int, most: int) -> np.ndarray:
    """`count` int32 numbers, none below 0 or above `most`."""
    if len(content) != 4 * count:
        raise UserError("another number of tokens or rows")
    numbers = np.frombuffer(content, "<i4")
    if np.any((numbers < 0) | (numbers > most)):
        raise UserError("a number outside its limits")
    return numbers.astype(np.int32)
