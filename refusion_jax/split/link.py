"""The device's end of the link: what a split model and its batches tell the server, and what comes back.

Messages that the server need not answer are not waited for.

Axes: B rows, T tokens, D hidden size, n tokens that cross.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from refusion_jax.split import frames
from refusion_jax.split.channel import Channel
from refusion_jax.split.codec import CODECS
from refusion_jax.split.model import Packing


class Link(Channel):
    """Where a device sends hidden states, and gets them back. Nothing is raised inside a forward pass: see `check`."""

    def __init__(self, address: tuple[str, int], key: Path, stamp: bytes, layers: int, codec: str, patience: float):
        """Connects a device that has so many layers of the model with this stamp, see `parts.fingerprint`.

        The codec, one of CODECS, is for both directions. The others, and what is raised, are those of `Channel`.
        """
        super().__init__(address, key, frames.Hello(frames.VERSION, stamp, layers, codec, b"", 0), patience)
        self.round_trips = 0  # results that were waited for
        self.crossed = self.crossed_exactly = 0  # bytes of hidden states, and what they would be in their own dtype
        self.fed = 0  # tokens of forwards whose results were waited for
        self.begin()

    def begin(self, codec: str = "") -> None:
        """A new session, of the same codec unless one is named; the counts go on."""
        self._hello = dataclasses.replace(self._hello, codec=codec or self._hello.codec)
        self._codec = CODECS[self._hello.codec]
        self._waiting: tuple | None = None  # a forward pass of which it is not known whether its result is wanted
        self._given: np.ndarray | None = None  # of the rows that are being filled: their given tokens
        self.failure: Exception | None = None
        super().begin()

    def check(self) -> None:
        """Raises what went wrong since the last call: the forwards since then mean nothing."""
        if self.failure:
            raise self.failure

    def start(self, rows: int, capacity: int) -> None:
        """An empty batch of so many rows and cache entries."""
        self._attempt(self._tell, frames.Start(0, rows, capacity))

    def admit(self, given: np.ndarray) -> None:
        """The forwards that follow fill new rows of so many given tokens, [R]; 0: a row that will be dropped."""
        self._given = given
        self._attempt(self._tell, frames.Admit(0, len(given)))

    def place(self, rows: np.ndarray) -> None:
        """The new rows take these places, [R]."""
        self._attempt(self._tell, frames.Place(0, _int32(rows)))
        self._given = None

    def send(self, packing: Packing, *arrays: np.ndarray) -> np.ndarray:
        """Takes x, positions, length, visible, index and fed of a forward pass: an int32 that `receive` depends on."""
        self._attempt(self._keep, packing, *map(np.asarray, arrays))
        return np.int32(0)

    def receive(self, shape: jax.ShapeDtypeStruct, packing: Packing, sent: np.ndarray) -> np.ndarray:
        """What the output head reads of the last forward, packed as x was; zeros once something went wrong."""
        out = self._attempt(self._fetch, shape, packing)
        return np.zeros(shape.shape, shape.dtype) if out is None else out

    def _attempt(self, function: Callable, *arguments: Any) -> Any:
        """Calls a function, unless something went wrong before: an exception is kept for `check`."""
        if not self.failure:
            try:
                return function(*arguments)
            except Exception as error:  # noqa: BLE001  raised inside a program, it would leave JAX in an unknown state
                self.failure = error
        return None

    def _keep(self, *forward: Any) -> None:
        """Keeps a forward pass until it is known whether its result is wanted."""
        self._flush()
        self._waiting = forward

    def _tell(self, message: frames.Message) -> None:
        self._flush()
        self.post(message)

    def _fetch(self, shape: jax.ShapeDtypeStruct, packing: Packing) -> np.ndarray:
        *_, index, fed = self._waiting
        result = self.result(self._flush(is_wanted=True))
        self.round_trips += 1
        self.fed += int(fed.sum())
        is_fed = np.arange(packing.width)[None] < fed[:, None]
        out = np.zeros(shape.shape, shape.dtype)
        x = self._codec.decode(result.tokens, is_fed.sum(), shape.shape[-1], shape.dtype)
        out[_packed(packing, index, is_fed)] = x
        self._count(result.tokens, x)
        return out

    def _flush(self, is_wanted: bool = False) -> int | None:
        """Sends the forward that waits, if there is one: its number."""
        if self._waiting is None:
            return None
        (packing, x, positions, length, visible, index, fed), self._waiting = self._waiting, None
        if not is_wanted and self._given is not None:
            fed = np.clip(self._given - length, 0, fed)  # the rest of a prompt's last chunk is padding
        is_fed = np.arange(packing.width)[None] < fed[:, None]
        x = x[_packed(packing, index, is_fed)]
        is_causal = np.array_equal(visible, np.broadcast_to(np.tri(packing.width, dtype=bool), visible.shape))
        content = self._codec.encode(x)
        self._count(content, x)
        forward = frames.Forward(
            number=0,
            wanted=is_wanted,
            **{name: getattr(packing, name) for name in ("width", "shards", "tile", "tiles")},
            fed=_int32(fed),
            length=_int32(length),
            positions=_int32(positions[is_fed]),
            visible=b"" if is_causal else np.packbits(visible).tobytes(),
            tokens=content,
        )
        return self.post(forward)

    def _count(self, content: bytes, x: np.ndarray) -> None:
        self.crossed += len(content)
        self.crossed_exactly += x.nbytes


def _packed(packing: Packing, index: np.ndarray, is_fed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The indices of the fed tokens of each row in the packed array [shards, places, D]."""
    shard = np.arange(packing.rows) // (packing.rows // packing.shards)
    return np.broadcast_to(shard[:, None], is_fed.shape)[is_fed], index[is_fed]


def _int32(x: np.ndarray) -> bytes:
    return x.astype("<i4").tobytes()
