"""Fast-dLLM (Wu et al., arXiv 2505.22618): an approximate cache and parallel commits for masked diffusion models.

Decoding, block by block: the first forward of a block runs over the whole text, and its keys and values are kept. The
following ones feed only a part of the text, which attends to the kept keys and values of the rest. These become stale
as the text changes, so that this is an approximation (exact for a model of one layer). `prefix` keeps what is before
the block, `dual` also what is behind it. In the first of two blocks of 2 behind 2 given tokens (row: token fed; column:
text; k: kept, 1: new):

    dual      k k 1 1 k k      prefix    k k 1 1 1 1
              k k 1 1 k k                k k 1 1 1 1
                                         k k 1 1 1 1
                                         k k 1 1 1 1

Every forward commits the most probable token of the block. By the rule `threshold` it also commits all others with
p >= threshold; by `factor`, the n most probable ones, with the largest n for which the n-th has
p >= 1 - factor / (n + 1).

It decodes models that other systems train. Where these read the token at j from the logits at j - 1 (`shift`; our
checkpoints store that), the first forward of a block also commits the first token of the block, since the token before
it is not fed again.

From the paper and the authors' code: caches, rules, blocks of 32, that first token. Our choices: a forward of a batch
runs either over whole texts, for rows that begin a block, or over blocks, for the other rows; `dual` reorders the kept
entries so that the block's own, which no later forward reads, are left out; a row ends once all places up to an EOS are
committed; mask and padding are never chosen.

Axes: B rows, C text length, N tokens to decode, K block length, F tokens fed on top of the cache, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float32, Int32, Key

from refusion_jax.cli.settings import setting
from refusion_jax.decoding import masked_text
from refusion_jax.decoding import settings as shared
from refusion_jax.decoding.cache import Cache, stored
from refusion_jax.decoding.masked_text import MaskedText, Window
from refusion_jax.decoding.plain import Plain
from refusion_jax.decoding.requests import Layout, Request, check_no_templates, most_new_tokens, text_capacity
from refusion_jax.decoding.sampling import probability
from refusion_jax.decoding.whole_text import in_smallest, widths
from refusion_jax.model.transformer import KeyValues, ModelConfig, Transformer
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
        "dual", "Keys and values kept between the forwards of a block: dual | prefix (only those before it) | none",
        scope="compiled", choices=("dual", "prefix", "none"),
    )  # fmt: skip
    rule: str = setting(
        "threshold", "Which tokens are committed: by threshold | by factor (more of them the surer they are)",
        scope="compiled", choices=("threshold", "factor"),
    )  # fmt: skip
    threshold: float = setting(
        0.9, "With rule=threshold: tokens at least this probable are committed at once", at_least=0, at_most=1
    )
    factor: float = setting(
        1.0, "With rule=factor: the n-th token is committed if p >= 1 - factor / (n + 1)", above=0, at_most=1e4
    )
    shift: str = setting(*masked_text.SHIFT, scope="compiled", choices=("auto", "yes", "no"))

    @classmethod
    def operating_points(cls, new_tokens: int, trained: Mapping[str, Any]) -> list[dict[str, Any]]:
        short = [{"block_length": 8, "threshold": threshold} for threshold in (0.9, 0.7)]
        return [{"threshold": threshold} for threshold in (0.95, 0.9, 0.7, 0.5)] + short


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSettings(shared.RowSettings):
    """The traced settings of each row."""

    block_length: Int32[ArrayLike, "*B"]
    threshold: Float32[ArrayLike, "*B"]
    factor: Float32[ArrayLike, "*B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State(MaskedText):
    """The state of the decoding loop."""

    block: Int32[Array, "B"]
    is_fresh: Bool[Array, "B"]  # the next forward of the row runs over its whole text
    entries: KeyValues  # C entries a row; a leading part is valid


@dataclasses.dataclass(frozen=True)
class BlockCache:
    """The decoder with its compiled sizes."""

    settings: ClassVar[type[FastSettings]] = FastSettings

    ids: shared.TokenIds
    width: int  # C, tokens of the longest text
    cache_length: int  # C, or 0 where nothing is kept
    new_tokens: int  # N, at most, in a row
    block_length: int  # K, at most, in a block
    reuse: str
    rule: str
    shifted: bool

    @classmethod
    def for_requests(cls, requests: Sequence[Request], model: ModelConfig) -> Self:
        """The smallest sizes that serve all of these requests.

        Raises:
          UserError: for templates, as the places that are fed must be contiguous.
        """
        check_no_templates(requests)
        N, C, own = most_new_tokens(requests), text_capacity(requests), requests[0].settings
        return cls(
            ids=shared.TokenIds.of(own, model),
            width=C,
            cache_length=0 if own.reuse == "none" else C,
            new_tokens=N,
            block_length=min(N, max(r.settings.block_length or N for r in requests)),
            reuse=own.reuse,
            rule=own.rule,
            shifted=masked_text.is_shifted(own.shift, model),
        )

    def lay_out(self, requests: Sequence[Request]) -> Layout:
        """Given tokens, places to decode and settings of some requests."""
        return Layout.of(requests, self.width, self.new_tokens, RowSettings)

    def init(self, model: Transformer, layout: Layout, keys: Key[Array, "B"]) -> State:
        """The initial state; there is no prefill, as the first forward runs over the whole text."""
        zeros = jnp.zeros(keys.shape, jnp.int32)
        entries = Cache.empty(model, len(zeros), self.cache_length).entries
        own = {"block": zeros, "is_fresh": zeros == 0, "entries": entries}
        return State.start(layout, keys, self.ids, self.block_length, **own)

    def step(self, model: Transformer, s: State) -> State:
        """One forward: over the whole text for rows that begin a block, or over blocks for the others."""
        if self.reuse == "none":
            return self._whole(model, s)
        return jax.lax.cond(self._is_whole(s), lambda s: self._whole(model, s), lambda s: self._block(model, s), s)

    def _is_whole(self, s: State) -> Bool[Array, ""]:
        """Whether half of the rows begin a block.

        With 16 rows that is 1.43 times as fast as not letting any of them wait in blocks of 8 tokens, and 1.06 times in
        blocks of 32; where all rows begin together, 1.59 and 0.81 times (configs/headline.py:tiny, on two CPU cores).
        """
        return 2 * jnp.sum(self._that_begin(s)) >= jnp.sum(s.active)

    def _that_begin(self, s: State) -> Bool[Array, "B"]:
        """The rows that take part in a forward over whole texts."""
        return s.active & s.is_fresh

    def _whole(self, model: Transformer, s: State) -> State:
        """A forward over whole texts, whose keys and values are kept."""
        (w, start, fed), C, took_part = self._window(s), self.width, self._that_begin(s)
        at = jnp.maximum(w.position - self.shifted, 0)

        def forward(width: int):
            index = jnp.broadcast_to(jnp.arange(width)[None], (len(at), width))
            visible = jnp.broadcast_to((index < s.length[:, None])[:, None], (len(at), width, width))
            nothing = jax.tree.map(lambda x: x[:, :, :, :0], s.entries)
            x, new = model.extend_hidden(s.text[:, :width], index, nothing, jnp.zeros_like(start), visible)
            x = jnp.take_along_axis(x, jnp.minimum(at, width - 1)[:, :, None], axis=1)
            return x, jax.tree.map(kept, new)

        def kept(x):
            room = max(0, self.cache_length - x.shape[2])
            return jnp.pad(x[:, :, : self.cache_length], ((0, 0), (0, 0), (0, room), (0, 0), (0, 0)))

        lengths = jnp.where(took_part, s.length, 0)
        x, new = in_smallest(lengths, widths(C, self.new_tokens), forward)
        logits = model.logits(x)
        if self.reuse == "none":
            return self._commit(s, w, logits, took_part, jnp.zeros_like(w.masked))
        index = jnp.arange(C)[None]
        if self.reuse == "dual":  # entries behind the block are moved next to those before it
            order = jnp.minimum(jnp.where(index < start[:, None], index, index + fed[:, None]), C - 1)
            order = order[None, :, :, None, None]
            new = jax.tree.map(lambda x: jnp.take_along_axis(x, order, axis=2), new)
        is_new = took_part[None, :, None, None, None]
        entries = jax.tree.map(lambda new, old: jnp.where(is_new, new, old), stored(new), s.entries)
        is_first = self.shifted & (jnp.arange(self.block_length)[None] == 0)
        return self._commit(dataclasses.replace(s, entries=entries), w, logits, took_part, is_first)

    def _block(self, model: Transformer, s: State) -> State:
        """A forward over the block, on top of the kept keys and values."""
        (w, start, fed), F = self._window(s), self.fed_width
        offset = jnp.arange(F)[None]
        index = start[:, None] + offset
        tokens = jnp.take_along_axis(s.text, jnp.minimum(index, self.width - 1), axis=1)
        visible = jnp.broadcast_to((offset < fed[:, None])[:, None], (len(fed), F, F))
        x, _ = model.extend_hidden(tokens, index, s.entries, s.length - fed, visible)
        # With a shifted model, the first token of the block was committed by the forward over the whole text.
        at = np.maximum(np.arange(self.block_length) - self.shifted, 0)
        return self._commit(s, w, model.logits(x[:, at]), s.active & ~s.is_fresh, jnp.zeros_like(w.masked))

    @property
    def fed_width(self) -> int:
        """F: with `dual` the block, else all from the block on."""
        return self.block_length if self.reuse == "dual" else self.new_tokens

    def _window(self, s: State) -> tuple[Window, Int32[Array, "B"], Int32[Array, "B"]]:
        """The window of the block, and the start and length of what is fed on top of the cache."""
        count, own = s.layout.places.count, s.layout.settings.block_length
        length = jnp.where(own > 0, own, count)
        first = s.block * length
        start = s.layout.given.length + first
        w = masked_text.window(s, self.ids, self.block_length, first, length)
        left = jnp.maximum(count - first, 0)
        return w, start, jnp.minimum(left, length) if self.reuse == "dual" else left

    def _commit(
        self,
        s: State,
        w: Window,
        logits: Float32[Array, "B K V"],
        took_part: Bool[Array, "B"],
        always: Bool[Array, "#B K"],
    ) -> State:
        """Commits masks of the block by the rule, and those in `always`."""
        chosen, real, _ = masked_text.propose(logits, s, w, self.ids)
        committed = w.masked & (surest(probability(real, chosen), w, self.rule, s.layout.settings) | always)
        is_over = ~jnp.any(w.masked & ~committed, axis=1)
        after = masked_text.commit(s, w, chosen, committed, self.ids, took_part)
        return dataclasses.replace(
            after,
            block=s.block + (took_part & is_over),
            is_fresh=jnp.where(took_part, is_over | (self.reuse == "none"), s.is_fresh),
        )


def surest(p: Float32[Array, "B K"], w: Window, rule: str, own: RowSettings) -> Bool[Array, "B K"]:
    """The masks of a window that a rule commits, at least the most probable one."""
    rank = masked_text.ranks(p, w)
    needed = own.threshold[:, None] if rule == "threshold" else 1 - own.factor[:, None] / (rank + 2)
    return w.masked & ((p >= needed) | (rank == 0))


def reference(model: Transformer, request: Request) -> dict:
    """The decoder in plain Python: one request, greedy. Kept keys and values are recomputed from the older text."""
    plain, s, commits = Plain(model, request), request.settings, []
    shift, n = masked_text.is_shifted(s.shift, model.config), len(plain.places)
    text, whole = dict(plain.given), [*range(request.length)]

    def tokens(places):
        return [text.get(place, plain.ids.mask_id) for place in places]

    def commit(p, block, fed, always=()):
        masks = [place for place in block if place not in text]
        best = {place: plain.best(p[fed.index(place) - shift], place) for place in masks}
        scores = {place: float(p[fed.index(place) - shift][best[place]]) for place in masks}
        order = sorted(scores, key=lambda place: -scores[place])
        needed = [s.threshold if s.rule == "threshold" else 1 - s.factor / (rank + 2) for rank in range(n)]
        sure = [place for place, least in zip(order, needed) if plain.above(scores[place], least)]  # noqa: B905
        for place in sorted({*(sure or plain.first(scores, 1)), *always}):
            text[place] = best[place]
            commits.append((best[place], place))

    length = s.block_length or n
    for block in (plain.places[i : i + length] for i in range(0, n, length)):
        while not plain.is_settled(text) and not all(place in text for place in block):
            then = tokens(whole)
            p = plain.forward("whole", then, whole, np.ones((len(whole), len(whole)), bool))
            commit(p, block, whole, block[:1] if shift and s.reuse != "none" else ())
            fed = block if s.reuse == "dual" else [*range(block[0], request.length)]
            while s.reuse != "none" and not plain.is_settled(text) and not all(place in text for place in block):
                sees = np.ones((len(whole) + len(fed),) * 2, bool)
                sees[: len(whole), len(whole) :] = False
                sees[len(whole) :, fed] = False  # the block attends to its new keys instead
                p = plain.forward("block", then + tokens(fed), whole + fed, sees)
                commit(p[len(whole) :], block, fed)
    return plain.result(commits, len(plain.phases))


SYSTEM = System(
    name="fast_dllm",
    objective=None,
    decoders={"fast_dllm": BlockCache},
    references={"fast_dllm": reference},
    decodes=("llada", "dream", "r2ft"),
)
