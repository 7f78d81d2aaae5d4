"""A model whose layers are split in two: the device's part, with a link to the other part, and the server's part.

Each part keeps the keys and values of its own layers. A forward pass writes those of its tokens after the committed
ones, and committing only advances a counter (decoding/cache.py): so each forward pass tells the server how many entries
are committed, the server writes after them, and needs no other messages.

Axes: B rows, T tokens of this forward pass, C cache entries, L layers of a part, D hidden size, K key/value heads, H
head size.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import io_callback
from jaxtyping import Array, Int32

from refusion_jax.cli.errors import UserError
from refusion_jax.decoding.cache import bytes_per_token
from refusion_jax.decoding.queue import Newcomers, Progress, RunningBatch
from refusion_jax.model.interface import Wrapper
from refusion_jax.model.key_values import KeyValues, attend_over
from refusion_jax.model.ragged import Ragged
from refusion_jax.model.transformer import Transformer


class Packing(NamedTuple):
    """How the tokens of a forward pass are packed; see model/ragged.py."""

    rows: int
    width: int
    shards: int
    tile: int
    tiles: int  # of a shard

    def ragged(self, fed: Int32[Array, "B"]) -> Ragged:
        return Ragged.of(fed, self.width, self.tile, self.tiles, self.shards)


class SplitModel(Wrapper):
    """The device's part, used as the whole model. Decoders that use no result of a forward pass do not wait for it."""

    def __init__(self, part: Transformer, link: Any):
        """The link is a `link.Link`, which the host uses while the accelerator waits."""
        super().__init__(part)
        self.link = link

    def extend_hidden(self, tokens, positions, cached, length, visible, ragged=None):
        """`extend_hidden` of the whole model, with the keys and values of the device's layers."""
        ragged = ragged or Ragged.whole(*tokens.shape)
        positions = jnp.maximum(positions, 0)  # a row without a request may feed the place before its first
        attend = attend_over(cached, length, visible, ragged)
        x = self.model.embedded(ragged.pack(tokens))
        x, new, _ = self.model.through_layers(x, ragged.pack(positions), attend)
        packing = Packing(ragged.rows, ragged.width, ragged.shards, ragged.tile, x.shape[1] // ragged.tile)
        arrays = (x, positions, length, visible, ragged.index(), ragged.fed)
        sent = jax.ShapeDtypeStruct((), jnp.int32)
        sent = io_callback(functools.partial(self.link.send, packing), sent, *arrays, ordered=True)
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        # Pure, so that it is removed if nothing depends on it: a prefill does not wait for its round trips.
        return jax.pure_callback(functools.partial(self.link.receive, shape, packing), shape, sent), new

    def hidden(self, *fed: Any):
        """Raises: only decoders with a cache can run over two machines."""
        raise UserError("a split model decodes on a cache only")


class SplitBatch(RunningBatch):
    """A batch that tells the server which rows are filled, without a prefix cache; `look` raises the link's errors."""

    def __init__(self, model: SplitModel, decoder: Any, like: Any, rows: int, blocks: int = 0):
        del blocks  # the server has none
        self._link = model.link
        super().__init__(model, decoder, like, rows)
        self._link.start(rows, decoder.cache_length)

    def _prefill(self, new: Newcomers) -> None:
        given = np.where(new.rows < self.rows, new.layout.given.length, 0)
        self._link.admit(given)
        super()._prefill(new)
        jax.block_until_ready(self._state)
        self._link.place(new.rows)

    def look(self) -> Progress:
        progress = super().look()
        self._link.check()
        return progress


class Upper:
    """The server's part of a model: runs forward passes of several batches at once."""

    def __init__(self, part: Transformer):
        self.hidden_size, self.dtype = part.config.hidden_size, part.dtype
        graphdef, params = nnx.split(part)
        self._params = nnx.to_pure_dict(params)
        self._part, self._run = part, jax.jit(functools.partial(_forward, graphdef), static_argnums=1, donate_argnums=2)

    def empty_cache(self, rows: int, capacity: int) -> KeyValues:
        # Copies, since keys and values are donated separately.
        return jax.tree.map(jnp.copy, self._part.empty_cache(rows, capacity))

    def cache_bytes(self, rows: int, capacity: int) -> int:
        return rows * capacity * bytes_per_token(self._part.config, self._part.cache_dtype)

    def __call__(
        self, packing: Packing, caches: Sequence[KeyValues], arrays: Sequence[tuple[np.ndarray, ...]]
    ) -> tuple[list[np.ndarray], list[KeyValues]]:
        """(inputs of the output head, [B, T, D]; the new cache) for every batch; all have the same packing.

        Caches are donated; arrays are hidden states [B, T, D], positions [B, T], visible [B, T, T], length, fed [B].
        """
        joined = [np.concatenate(parts) for parts in zip(*arrays, strict=True)]
        several = packing._replace(rows=packing.rows * len(caches), shards=packing.shards * len(caches))
        x, caches = self._run(self._params, several, list(caches), *joined)
        return np.split(np.asarray(x), len(caches)), caches


def _forward(graphdef, params, packing: Packing, caches: list[KeyValues], x, positions, visible, length, fed):
    part, ragged = nnx.merge(graphdef, params), packing.ragged(fed)
    cached = jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), *caches)
    attend = attend_over(cached, length, visible, ragged, -_first_layer(part))
    x, new, _ = part.through_layers(ragged.pack(x.astype(part.dtype)), ragged.pack(positions), attend)
    new = jax.tree.map(lambda x: jax.vmap(ragged.spread)(x), new)  # [L, B, T, K, H]
    at = length[:, None] + jnp.arange(packing.width)[None]  # [B, T]; those past the end are never committed
    rows = jnp.arange(packing.rows)[:, None]

    def put(cached, new):
        return cached.at[:, rows, :, at].set(new.transpose(1, 2, 0, 3, 4), mode="drop")

    cached = jax.tree.map(put, cached, new)
    each = packing.rows // len(caches)
    parts = [jax.tree.map(lambda x, i=i: x[:, i * each : (i + 1) * each], cached) for i in range(len(caches))]
    return ragged.spread(part.normed(x)), parts


def _first_layer(part: Transformer) -> int:
    dense = getattr(part, "dense_layers", None)
    return part.layers.first if dense is None or dense.first == dense.end else dense.first
