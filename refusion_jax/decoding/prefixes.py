"""A store of prefixes: keys and values of prompts, kept for later prompts.

Prompts with a common prefix have the same keys and values there. A store of fixed size holds them in blocks, even after
the rows that computed them are gone. New requests copy the blocks that they begin with, prefill the rest, and leave
their own blocks in the store, where the least recently used ones are overwritten.

Axes: R requests admitted at once, N blocks of the store, M blocks of a text, S tokens of a block; L layers, C cache
entries, K key/value heads, H head size.
"""

import collections
import functools
import hashlib
import weakref
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from refusion_jax.decoding import cache as kv
from refusion_jax.decoding.requests import Request
from refusion_jax.model.key_values import KeyValues


class Prefixes:
    """Which blocks are in the store, and where."""

    def __init__(self, count: int, size: int):
        """An empty store of N blocks of S tokens."""
        self.count, self.size = count, size
        self._places: collections.OrderedDict[bytes, int] = collections.OrderedDict()  # least recently used first
        self._names: weakref.WeakKeyDictionary[Request, list[bytes]] = weakref.WeakKeyDictionary()

    def blocks_of(self, request: Request) -> list[bytes]:
        """Names of the whole blocks that a request begins with; each identifies all given tokens up to its end.

        The last given token is in none of them, since decoding may feed it again.
        """
        if request in self._names:  # 3.4 ms for 32,000 tokens, of which a prompt waits for many rounds
            return self._names[request]
        given, name = np.array(request.given, np.int32), b""
        names = self._names[request] = []
        for end in range(self.size, given.shape[1] * (self.count > 0), self.size):
            name = hashlib.blake2b(name + given[:, end - self.size : end].tobytes(), digest_size=16).digest()
            names.append(name)
        return names

    def known(self, blocks: Sequence[bytes]) -> int:
        """How many of the blocks that a request begins with are in the store."""
        return next((number for number, block in enumerate(blocks) if block not in self._places), len(blocks))

    def group(self, waiting: Sequence[Sequence[bytes]], most: int) -> list[int]:
        """Which requests to prefill together, given the blocks of each: the first, and those with as many known blocks.

        A request with a new block that another one of the group computes waits for that.
        """
        known, chosen, computed = [self.known(blocks) for blocks in waiting], [], set()
        for number, blocks in enumerate(waiting):
            new = set(blocks[known[number] : known[number] + 1])
            if known[number] == known[0] and not new & computed and len(chosen) < most:
                chosen.append(number)
                computed |= new
        return chosen

    def use(self, texts: Sequence[Sequence[bytes]], known: int, M: int) -> tuple[np.ndarray, np.ndarray]:
        """(places of the blocks to copy, places for the new blocks), [R, M] each; 0 and N where unused.

        `texts` are the blocks of requests that are admitted together; the first `known` of each are in the store.
        """
        copied, written = np.zeros((len(texts), M), np.int32), np.full((len(texts), M), self.count, np.int32)
        self._touch(texts)  # before any is overwritten
        own = {block for blocks in texts for block in blocks}
        for row, blocks in enumerate(texts):
            copied[row, : len(blocks[:known])] = [self._places[block] for block in blocks[:known]]
            for depth, block in enumerate(blocks[known:], known):
                has_room = len(self._places) < self.count or next(iter(self._places)) not in own
                if block not in self._places and has_room:
                    written[row, depth] = self._places[block] = self._next()
        self._touch(texts)
        return copied, written

    def _touch(self, texts: Sequence[Sequence[bytes]]) -> None:
        """Marks blocks as used, leading ones last: no later block is found without those before it."""
        for block in (block for blocks in texts for block in reversed(blocks) if block in self._places):
            self._places.move_to_end(block)

    def _next(self) -> int:
        """An unused place, or else that of the least recently used block, which is evicted."""
        is_full = len(self._places) == self.count
        return self._places.popitem(last=False)[1] if is_full else len(self._places)


@functools.partial(jax.jit, static_argnames=("N", "S"))
def empty_store(entries: KeyValues, N: int, S: int) -> KeyValues:
    """An empty store [L, N, K, S, H] for blocks of entries, of which only shapes and dtypes matter."""
    blocks = jax.tree.map(lambda x: jnp.zeros((x.shape[0], N, x.shape[2], S, x.shape[4]), x.dtype), entries)
    return kv.split(blocks, rows=None)


def copy(store: KeyValues, places: Int32[Array, "R M"], C: int) -> KeyValues:
    """The entries of R rows that begin with these blocks of the store, [L, R, K, C, H]."""

    def of(x: jax.Array) -> jax.Array:
        rows = jnp.moveaxis(x[:, places], 2, 3)  # [L, R, K, M, S, H]
        rows = rows.reshape(*rows.shape[:3], -1, rows.shape[-1])
        return jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, C - rows.shape[3]), (0, 0)))

    return jax.tree.map(of, store)


def write(store: KeyValues, entries: KeyValues, places: Int32[Array, "R M"]) -> KeyValues:
    """The store with the blocks of R rows, [L, R, K, C, H], at these places; those outside it are dropped."""

    def of(old: jax.Array, new: jax.Array) -> jax.Array:
        blocks = new[:, :, :, : places.shape[1] * old.shape[3]]
        blocks = blocks.reshape(*blocks.shape[:3], -1, *old.shape[3:])
        return old.at[:, places].set(jnp.moveaxis(blocks, 3, 2), mode="drop")

    return kv.split(jax.tree.map(of, store, entries), rows=None)
