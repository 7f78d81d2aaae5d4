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

from refusion_jax.model.key_values import KeyValues
from refusion_jax.split import frames
from refusion_jax.split.batching import Batches, ForwardJob
from refusion_jax.split.codec import Codec
from refusion_jax.split.model import Packing, Upper


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
    capacity: int = 0
    cache_bytes: int = 0  # of the batch, and as much for rows that are being filled
    connection: socket.socket | None = None
    left_at: float = 0.0  # when its last connection ended
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def deal(self, message: frames.Message) -> frames.Result | None:
        """Processes a message and returns its result, if wanted; UserError without memory."""
        deals = {
            frames.Start: self._start, frames.Admit: self._admit, frames.Place: self._place,
            frames.Forward: self._forward,
        }  # fmt: skip
        if message.number > self.last:
            deals[type(message)](message)
            self.last = message.number
        is_wanted = isinstance(message, frames.Forward) and message.wanted
        return self.result if is_wanted and self.result and self.result.number == message.number else None

    def _start(self, message: frames.Start) -> None:
        self.reserve(self, 2 * self.upper.cache_bytes(message.rows, message.capacity))
        self.capacity = message.capacity
        self.batch, self.new = self.upper.empty_cache(message.rows, message.capacity), None

    def _admit(self, message: frames.Admit) -> None:
        self.new = self.upper.empty_cache(message.rows, self.capacity)

    def _place(self, message: frames.Place) -> None:
        self.batch, self.new = _put(self.batch, self.new, _numbers(message.rows)), None

    def _forward(self, message: frames.Forward) -> None:
        """Writes the keys and values of the fed tokens; the result is the inputs of the output head for them."""
        cache = self.batch if self.new is None else self.new
        packing, arrays, is_fed = self._read(message, jax.tree.leaves(cache)[0].shape[1])
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
        fed, length = _numbers(message.fed), _numbers(message.length)
        is_fed = np.arange(T)[None] < fed[:, None]
        x, positions = np.zeros((B, T, D), dtype), np.zeros((B, T), np.int32)
        positions[is_fed] = _numbers(message.positions)
        x[is_fed] = self.codec.decode(message.tokens, is_fed.sum(), D, dtype)
        visible = np.broadcast_to(np.tri(T, dtype=bool), (B, T, T))
        if message.visible:
            visible = np.unpackbits(np.frombuffer(message.visible, np.uint8), count=B * T * T) > 0
        return packing, (x, positions, visible.reshape(B, T, T), length, fed), is_fed


@functools.partial(jax.jit, donate_argnums=0)
def _put(batch: KeyValues, new: KeyValues, rows: jax.Array) -> KeyValues:
    return jax.tree.map(lambda all, own: all.at[:, rows].set(own, mode="drop"), batch, new)


def _numbers(content: bytes) -> np.ndarray:
    return np.frombuffer(content, "<i4")
