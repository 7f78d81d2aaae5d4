"""Fast-dLLM (Wu et al., arXiv 2505.22618): an approximate cache and parallel commits for masked diffusion models.

Decoding, block by block: the first forward pass of a block runs over the whole text, and its keys and values are kept.
The following ones take only a part of the text, which attends to the kept keys and values of the rest. These become
stale as the text changes, so that this is an approximation (exact for a model of one layer). `prefix` keeps those
before the block, `dual` also those after it. In the first of two blocks of 2 after 2 given tokens (row: token fed;
column: text; k: kept, 1: new):

    dual      k k 1 1 k k      prefix    k k 1 1 1 1
              k k 1 1 k k                k k 1 1 1 1
                                         k k 1 1 1 1
                                         k k 1 1 1 1

Every forward pass commits the most probable token of the block, and all others with p >= threshold.

It decodes models that other systems train. Where these read the token at j from the logits at j - 1 (our checkpoints
store that), the first forward pass of a block also commits the first token of the block, since the token before it is
not fed again.

From the paper and the authors' code: caches, threshold, blocks of 32, that first token. Left out: their other rule, by
`factor`, which commits more tokens the more confident they are. Our choices: a forward pass of a batch runs either
over whole texts, for rows that begin a block, or over blocks, for the other rows; `dual` reorders the kept entries so
that the block's own, which no later forward pass reads, are left out; a row ends once all places up to an EOS are
committed; mask and padding are never chosen.

Axes: B rows, C text length, N tokens to decode, K block length, F tokens fed on top of the cache, V vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int32, Key

from refusion_jax.cli.settings import setting
from refusion_jax.decoding import settings as shared
from refusion_jax.decoding.cache import Cache, stored
from refusion_jax.decoding.reference import ReferenceDecoder
from refusion_jax.decoding.requests import Layout, Request
from refusion_jax.decoding.sampling import surest
from refusion_jax.model.interface import LanguageModel
from refusion_jax.model.key_values import KeyValues
from refusion_jax.model.shape import ModelConfig
from refusion_jax.systems import masked
from refusion_jax.systems.interface import System

_BLOCK = 32  # as in the paper


@dataclasses.dataclass(frozen=True)
class FastSettings(shared.Settings):
    """How to decode a masked diffusion model with a cache."""

    block_length: int = setting(
        _BLOCK, "Tokens of a block; blocks are decoded one after the other; 0: the whole answer", at_least=0,
        at_most=2**24,
    )  # fmt: skip
    reuse: str = setting(
        "dual", "Keys and values kept between the passes over a block: dual | prefix (only those before it) | none",
        scope="compiled", choices=("dual", "prefix", "none"),
    )  # fmt: skip
    threshold: float = setting(0.9, "Tokens at least this probable are committed at once", at_least=0, at_most=1)
    points = [{"threshold": threshold} for threshold in (0.95, 0.9, 0.7, 0.5)]
    points += [{"block_length": 8, "threshold": threshold} for threshold in (0.9, 0.7)]


@struct.dataclass
class BlockCacheState(masked.MaskedText):
    """The text, and its kept keys and values."""

    entries: KeyValues  # C entries of each row; a leading part is valid


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockCache(masked.MaskedDecoder):
    """Fills blocks on kept keys and values."""

    settings: ClassVar[type[FastSettings]] = FastSettings
    fills_gaps: ClassVar[bool] = False  # the places that are fed must be contiguous

    reuse: str

    @classmethod
    def for_requests(cls, requests: Sequence[Request], model: ModelConfig) -> Self:
        own = super().for_requests(requests, model)
        return dataclasses.replace(own, cache_length=0 if own.reuse == "none" else own.width)

    def init(self, model: LanguageModel, layout: Layout, keys: Key[Array, "B"]) -> BlockCacheState:
        """The initial state; there is no prefill, as the first forward pass runs over the whole text."""
        entries = Cache.empty(model, len(keys), self.cache_length).entries
        return self.start_text(BlockCacheState, layout, keys, self.block_length, entries=entries)

    def chosen(self, s: BlockCacheState, w: masked.Window, proposal: masked.Proposal) -> Bool[Array, "B K"]:
        """The masks that reach the threshold, at least the most probable one."""
        p = proposal.probability
        return surest(p, w.masked, p >= s.settings.threshold[:, None])

    def step(self, model: LanguageModel, s: BlockCacheState) -> BlockCacheState:
        """One forward pass: over the whole text for rows that begin a block, or over blocks for the others."""
        if self.reuse == "none":
            return super().step(model, s)
        w = s.window(self.block_length, s.block_start, s.block_length)
        left = s.places.count - s.block_start
        # A row begins a block if nothing of the block is committed yet.
        begins = jnp.sum(w.masked, axis=1) == jnp.minimum(s.block_length, left)
        # Whole texts if half of the rows begin a block: with 16 rows that is 1.43 times as fast as letting none of them
        # wait, in blocks of 8 tokens, and 1.06 times in blocks of 32; if all rows begin together, 1.59 and 0.81 times
        # (configs/headline.py:tiny, on two CPU cores).
        is_whole = 2 * jnp.sum(s.active & begins) >= jnp.sum(s.active)
        takes_part = s.active & (begins == is_whole)
        whole, block = (lambda: self._whole(model, s, w, takes_part)), (lambda: self._block(model, s))
        x, entries = jax.lax.cond(is_whole, whole, block)
        proposal = s.propose(model.logits(x), w.position, w.masked)
        is_first = is_whole & self.shifted & (jnp.arange(self.block_length)[None] == 0)
        chosen = takes_part[:, None] & (self.chosen(s, w, proposal) | is_first)
        after = s.commit(w, proposal.token, chosen)
        return after.replace(entries=entries, forwards=s.forwards + takes_part)

    def _whole(
        self, model: LanguageModel, s: BlockCacheState, w: masked.Window, takes_part: Bool[Array, "B"]
    ) -> tuple[Float[Array, "B K D"], KeyValues]:
        """A pass over whole texts: (inputs of the output head for the block, the keys and values to keep)."""
        (start, fed), C = self._fed(s), self.width
        at = jnp.maximum(w.position - self.shifted, 0)

        def forward(width: int):
            index = jnp.broadcast_to(jnp.arange(width)[None], (len(at), width))
            visible = jnp.broadcast_to((index < s.length[:, None])[:, None], (len(at), width, width))
            nothing = jax.tree.map(lambda x: x[:, :, :, :0], s.entries)
            x, new = model.extend_hidden(s.text[:, :width], index, nothing, jnp.zeros_like(start), visible)
            x = jnp.take_along_axis(x, jnp.minimum(at, width - 1)[:, :, None], axis=1)
            room = (0, 0), (0, 0), (0, C - width), (0, 0), (0, 0)
            return x, jax.tree.map(lambda x: jnp.pad(x, room), new)

        lengths = jnp.where(takes_part, s.length, 0)
        x, new = masked.in_smallest(lengths, masked.widths(C, self.new_tokens), forward)
        index = jnp.arange(C)[None]
        if self.reuse == "dual":  # entries after the block are moved next to those before it
            order = jnp.minimum(jnp.where(index < start[:, None], index, index + fed[:, None]), C - 1)
            order = order[None, :, :, None, None]
            new = jax.tree.map(lambda x: jnp.take_along_axis(x, order, axis=2), new)
        is_new = takes_part[None, :, None, None, None]
        return x, jax.tree.map(lambda new, old: jnp.where(is_new, new, old), stored(new), s.entries)

    def _block(self, model: LanguageModel, s: BlockCacheState) -> tuple[Float[Array, "B K D"], KeyValues]:
        """`_whole` for a forward pass over the block, on top of the kept keys and values."""
        start, fed = self._fed(s)
        F = self.block_length if self.reuse == "dual" else self.new_tokens  # with `dual` the block, else all from it on
        offset = jnp.arange(F)[None]
        index = start[:, None] + offset
        tokens = jnp.take_along_axis(s.text, jnp.minimum(index, self.width - 1), axis=1)
        visible = jnp.broadcast_to((offset < fed[:, None])[:, None], (len(fed), F, F))
        x, _ = model.extend_hidden(tokens, index, s.entries, s.length - fed, visible)
        # With a shifted model, the first token of the block was committed by the forward pass over the whole text.
        at = np.maximum(np.arange(self.block_length) - self.shifted, 0)
        return x[:, at], s.entries

    def _fed(self, s: BlockCacheState) -> tuple[Int32[Array, "B"], Int32[Array, "B"]]:
        """(start, length) of what is fed on top of the cache: the block, or everything from its start on."""
        first = s.block_start
        left = jnp.maximum(s.places.count - first, 0)
        return s.first + first, jnp.minimum(left, s.block_length) if self.reuse == "dual" else left


def reference(model: LanguageModel, request: Request) -> dict:
    """The decoder in plain Python: one request, greedy. Kept keys and values are recomputed from the older text."""
    plain, s = ReferenceDecoder(model, request), request.settings
    shift, n = model.config.shifted, len(plain.places)
    whole = [*range(request.length)]

    def commit(p, block, fed, always=()):
        rows = {place: p[fed.index(place) - shift] for place in block if place not in plain.text}
        plain.text |= {place: plain.best(rows[place], place) for place in always} | plain.surest(rows, s.threshold)

    length = s.block_length or n
    for block in (plain.places[i : i + length] for i in range(0, n, length)):
        while not plain.is_complete() and not all(place in plain.text for place in block):
            then = plain.tokens(whole)
            commit(plain.denoise("whole"), block, whole, block[:1] if shift and s.reuse != "none" else ())
            fed = block if s.reuse == "dual" else [*range(block[0], request.length)]
            while s.reuse != "none" and not plain.is_complete() and not all(place in plain.text for place in block):
                sees = np.ones((len(whole) + len(fed),) * 2, bool)
                sees[: len(whole), len(whole) :] = False
                sees[len(whole) :, fed] = False  # the block attends to its new keys instead
                p = plain.forward("block", then + plain.tokens(fed), whole + fed, sees)
                commit(p[len(whole) :], block, fed)
    return plain.result()


SYSTEM = System(
    name="fast_dllm",
    decoders={"fast_dllm": BlockCache},
    references={"fast_dllm": reference},
    decodes=("llada", "dream", "r2ft"),
)
