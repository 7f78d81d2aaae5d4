"""Lossless drafting: the text that the model writes one token at a time, several tokens per forward.

The text is written left to right, each token predicted by the one before it. (Where a gap does not directly follow the
token before it, a mask that sees all committed tokens predicts its first one.) Slots of masks guess ahead. Each forward
pass takes the last token, N - 1 drafts of the tokens after it, and N masks for each of G prefixes of the drafts, as if
the text ended there:

    places   3 4 5 6 | 5 6 7 8 | 7 8 9 10       N = 4, G = 2: masks after the first draft, and after all three
    tokens   x d d d | M M M M | M M M M
    x        1 . . .   . . . .   . . . .        The drafts are accepted up to the first that differs from the model's
    d        1 1 . .   . . . .   . . . .        own next token, which takes its place. (With a temperature both are
    d        1 1 1 .   . . . .   . . . .        drawn with the same noise.) The masks after this prefix have made the
    d        1 1 1 1   . . . .   . . . .        next drafts: all but their first, whose token is known by then. Of
    M        1 1 . .   1 . . .   . . . .        masks after a shorter prefix, those of later places still count; if
    M        1 1 . .   1 1 . .   . . . .        there are none, so do the drafts that were not reached.
    M        1 1 . .   1 1 1 .   . . . .
    M        1 1 . .   1 1 1 1   . . . .        The G prefixes are those at which rejection is most probable, by the
    M        1 1 1 1   . . . .   1 . . .        probabilities of the drafts. With two slots at once, the second half
    M        1 1 1 1   . . . .   1 1 . .        of the masks does not see the first. The prefill's last pass takes
    M        1 1 1 1   . . . .   1 1 1 .        the first masks, and so commits the first token.
    M        1 1 1 1   . . . .   1 1 1 1

With `end_threshold` below 1 drafts that end the text are committed without being verified, which saves the last
forward pass, if the product of the probabilities at their masks is at least that.

With the same noise a sampled text depends on its seed alone, whatever is drafted (Daliri et al., arXiv 2408.07978). A
draft is accepted with a probability of at least (1 - d) / (1 + d), where d is the total variation distance of the two
distributions; by the rejection rule of speculative sampling it would be 1 - d.

Axes: B rows, N tokens per forward at most, M = N - 1 drafts, G prefixes, W = N (1 + G) fed tokens, P given
tokens of the prefill's last forward pass, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32, Key

from refusion_jax.cli.settings import setting
from refusion_jax.decoding import cache as kv
from refusion_jax.decoding import settings as shared
from refusion_jax.decoding.decoder import LAST_TOKEN, Continuation, Continuer
from refusion_jax.decoding.requests import Layout, Request
from refusion_jax.decoding.sampling import entry, run_length, sample, select
from refusion_jax.decoding.trajectory import tell
from refusion_jax.distributed.chips import free_tokens
from refusion_jax.distributed.sharding import device_kind_here, shard_count_here
from refusion_jax.model.interface import LanguageModel
from refusion_jax.model.shape import ModelConfig

# (slots drafted at once, prefixes followed by masks) -> share of the drafts that are accepted, with slots of 8
# on the problems of benchmarks/results/dense.md.
_ACCEPTED = {(1, 1): 0.53, (1, 2): 0.54, (2, 2): 0.33}
_OVERHEAD = 16  # what a forward pass costs besides its tokens, in tokens, at the least


@dataclasses.dataclass(frozen=True)
class DraftSettings(shared.Settings):
    """How to decode a dense model left to right."""

    slot_size: int = setting(8, "Tokens per slot", scope="compiled", at_least=1, at_most=4096)
    fed_tokens: int = setting(
        0, "Tokens computed per row and forward pass, at most: 2, 3 or 6 slots of drafts and masks; with fewer than 2 "
        "slots it writes one token at a time; 0: whatever is fastest on this device. The text is always the same",
        scope="compiled", at_least=0, at_most=2**16,
    )  # fmt: skip
    end_threshold: float = setting(
        1.0, "Greedy: drafts up to the end of the text are committed without being verified if it is at least so "
        "probable that all of them are right; 1: never, and the text is that of one token at a time",
        at_least=0, at_most=1,
    )  # fmt: skip

    @property
    def unread(self) -> dict[str, str]:
        return {"end_threshold": "temperature"} if self.temperature else {}

    @classmethod
    def operating_points(cls, new_tokens: int, trained: Mapping[str, Any]) -> list[dict[str, Any]]:
        size = max(trained["sizes"])
        points = [{"slot_size": size, "fed_tokens": fed} for fed in (1, 2 * size, 3 * size, 6 * size)]
        return [*points, {"slot_size": size, "fed_tokens": 2 * size, "end_threshold": 0.9}]


@struct.dataclass
class Drafts:
    """Guesses of the tokens after the last one of each row, in the order of the text."""

    tokens: Int32[Array, "B M"]
    sure: Float32[Array, "B M"]  # the highest probability at the mask of each
    count: Int32[Array, "B"]  # the first so many are drafts, the others padding

    @classmethod
    def none(cls, B: int, M: int) -> Self:
        return cls(jnp.zeros((B, M), jnp.int32), jnp.zeros((B, M), jnp.float32), jnp.zeros((B,), jnp.int32))

    @property
    def is_draft(self) -> Bool[Array, "B M"]:
        return jnp.arange(self.tokens.shape[1])[None] < self.count[:, None]

    def cut(self, size: int, count: Int32[Array, "B"]) -> Self:
        """The first `size`, of which the first `count` are drafts."""
        return Drafts(self.tokens[:, :size], self.sure[:, :size], jnp.minimum(count, size))

    def at(self, index: Int32[Array, "B K"], count: Int32[Array, "B"]) -> Self:
        """Those at K indices, of which the first `count` are drafts."""
        tokens, sure = (jnp.take_along_axis(x, index, axis=1) for x in (self.tokens, self.sure))
        return Drafts(tokens, sure, jnp.clip(count, 0, index.shape[1]))

    def likely_prefixes(self, G: int) -> Int32[Array, "B G"]:
        """The G lengths of the accepted prefix that are most probable."""
        accepts = jnp.where(self.is_draft, self.sure, 0)
        accepts = jnp.pad(accepts, ((0, 0), (1, 1)), constant_values=((0, 0), (1, 0)))
        exactly = jnp.cumprod(accepts[:, :-1], axis=1) * (1 - accepts[:, 1:])  # [B, M + 1], by the length
        return jax.lax.top_k(exactly, G)[1]


@struct.dataclass
class DraftingState(Continuation):
    """The drafts that the next forward pass verifies."""

    drafts: Drafts  # of the tokens after the last one

    @property
    def rounds(self) -> Int32[Array, "B"]:
        """Every token counts as a round: as many as one token at a time takes."""
        return self.record.count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting(Continuer):
    """Writes the text of one token at a time, by drafts that a forward pass verifies; with its compiled sizes."""

    settings: ClassVar[type[DraftSettings]] = DraftSettings
    fills_gaps: ClassVar[bool] = True
    next_token: ClassVar[str] = LAST_TOKEN
    typical: ClassVar[dict[float, float]] = {16.0: 5.32, 2.0: 1.0}

    slot_size: int
    fed_tokens: int  # of a row, at most; 0: what pays

    @classmethod
    def for_requests(cls, requests: Sequence[Request], model: ModelConfig) -> Self:
        own = cls.sized(requests, model, width=0)
        reach, prefixes = own.most
        return cls.sized(requests, model, width=reach * (1 + prefixes))

    @classmethod
    def settings_for(cls, fed: float, new_tokens: int, slot_size: int = 8) -> dict[str, Any]:
        return {"fed_tokens": int(fed)}

    @property
    def most(self) -> tuple[int, int]:
        """(N, G) of the widest forward pass."""
        return max(self._passes)

    @property
    def _passes(self) -> dict[tuple[int, int], float]:
        """(N, G) -> expected tokens per forward, of the forward passes that the settings allow."""
        found = {(1, 1): 1.0}
        for (slots, prefixes), share in _ACCEPTED.items():
            N = slots * self.slot_size
            if not self.fed_tokens or N * (1 + prefixes) <= self.fed_tokens:
                found[N, min(prefixes, N)] = 1 + share * (N - 1)
        return {max(found): 1.0} if self.fed_tokens else found

    def best_pass(self, model: LanguageModel, rows: int) -> tuple[int, int]:
        """(N, G) of a forward pass with this many rows: most tokens in a time that grows with all that is fed."""
        free = free_tokens(model.weight_bytes, device_kind_here(), model.operand_dtype.itemsize)
        rows = rows // shard_count_here("batch")

        def speed(size):
            N, G = size
            return self._passes[size] / (max(free, _OVERHEAD) + rows * N * (1 + G))

        return max(self._passes, key=speed)

    def init(self, model: LanguageModel, layout: Layout, keys: Key[Array, "B"]) -> DraftingState:
        """The initial state: all that is given is prefilled, and the first token committed."""
        given, N, B = layout.given, self.most[0], len(layout.given.length)
        P = kv.tokens_at_once(self.chunk, masks=N)
        before = jnp.maximum(given.length - P, 0)  # prefilled without masks
        cache = kv.prefill(model, given.replace(length=before), P)
        s = self.start(DraftingState, layout, keys, cache=cache, drafts=Drafts.none(B, N - 1))

        index = jnp.minimum(before[:, None] + jnp.arange(P)[None], given.tokens.shape[1] - 1)
        tokens, places = (jnp.take_along_axis(x, index, axis=1) for x in (given.tokens, given.positions))
        last, prefixes = given.length - before - 1, jnp.zeros((B, 1), jnp.int32)
        fed, at, visible = self._with_masks(s, tokens, places, prefixes, prefixes + last[:, None], N)
        x, new = model.extend_hidden(fed, at, cache.entries, cache.length, visible)
        x = jnp.concatenate([jnp.take_along_axis(x, last[:, None, None], axis=1), x[:, P:]], axis=1)
        after = self._advance(s, entry(places, last), Drafts.none(B, 0), model.logits(x), prefixes, at[:, P:])
        cache = kv.Cache(kv.write(cache, new).entries, given.length)
        return after.replace(cache=cache, forwards=s.forwards)

    def step(self, model: LanguageModel, s: DraftingState) -> DraftingState:
        """One forward pass, in which each row commits the accepted drafts and one more token, and makes new drafts."""
        N, G = self.best_pass(model, len(s.active))
        # The last token, which is not in the cache yet: every row that decodes has committed one.
        last, first = jnp.maximum(s.record.count - 1, 0), self._next_place(s)
        token, place = entry(s.record.tokens, last), entry(s.record.positions, last)
        usable = jnp.where(first == place + 1, s.drafts.count, 0)  # none in the next gap
        drafts = s.drafts.cut(N - 1, usable)
        prefixes = drafts.likely_prefixes(G)

        tokens = jnp.concatenate([token[:, None], drafts.tokens], axis=1)
        places = jnp.concatenate([place[:, None], first[:, None] + jnp.arange(N - 1)[None]], axis=1)
        fed, at, visible = self._with_masks(s, tokens, places, prefixes, prefixes, N)
        logits, cache = kv.extend(model, s.cache, fed, at, visible)
        return self._advance(s.replace(cache=cache), place, drafts, logits, prefixes, at[:, N:])

    def _next_place(self, s: DraftingState) -> Int32[Array, "B"]:
        return entry(s.places.position, jnp.minimum(s.record.count, self.new_tokens - 1))

    def _decoded_at(self, s: DraftingState, ahead: Int32[Array, "#B K"]) -> Int32[Array, "B K"]:
        """The places that are decoded after so many others."""
        number = jnp.minimum(s.record.count[:, None] + ahead, self.new_tokens - 1)
        return jnp.take_along_axis(s.places.position, number, axis=1)

    def _with_masks(
        self, s: DraftingState, tokens: Array, places: Array, prefixes: Array, seen: Array, N: int
    ) -> tuple[Array, Array, Array]:
        """(tokens, places, attention mask) of a forward pass over causal tokens, and N masks after each prefix.

        `seen` [B, G] is the index of the last token that the masks of each prefix see.
        """
        ahead = (self._next_place(s)[:, None] + prefixes)[:, :, None] + jnp.arange(N)[None, None]
        ahead = ahead.reshape(len(tokens), -1)  # [B, G N]
        fed = jnp.concatenate([tokens, jnp.full(ahead.shape, self.ids.mask_id)], axis=1)
        visible = kv.visible_to_masks(tokens.shape[1], seen, N, self.slot_size)
        return fed, jnp.concatenate([places, ahead], axis=1), visible

    def _advance(
        self, s: DraftingState, last: Array, drafts: Drafts, logits: Array, prefixes: Array, masks: Array
    ) -> DraftingState:
        """The next state, after a forward pass over the last token, these drafts, and N masks after each prefix.

        `last` [B] is the place of the last token, `masks` [B, G N] are those of the masks. The logits are those at the
        last token and the drafts, and then at the masks. The keys and values are in the cache of `s`.
        """
        n, first = 1 + drafts.tokens.shape[1], self._next_place(s)[:, None]  # n verified places
        places = jnp.concatenate([first + jnp.arange(n)[None], masks], axis=1)
        to_decode = self._decoded_at(s, places - first)  # differs from `places` after this gap
        choosable = s.choosable(logits, to_decode)
        is_led_up_to = first == last[:, None] + 1  # otherwise the first mask predicts the first token of the gap
        choosable = choosable.at[:, 0].set(jnp.where(is_led_up_to, choosable[:, 0], choosable[:, n]))
        drawn = sample(choosable, jnp.ones_like(places, bool), s.keys, places, s.settings)

        tokens, room = drawn[:, :n], run_length((to_decode == places)[:, :n])
        accepted = run_length((tokens[:, :-1] == drafts.tokens) & drafts.is_draft)
        tell(drafts.tokens, places[:, : n - 1], drafts.is_draft)
        after, kept = s.commit(s.cache, tokens, places[:, :n], jnp.minimum(accepted + 1, room))
        if masks.shape == prefixes.shape:  # the token of the only mask is known by now
            return after.replace(drafts=s.drafts.replace(count=jnp.zeros_like(kept)))

        at_masks = choosable[:, n:]
        sure = jnp.exp(jnp.max(at_masks, axis=-1) - jax.nn.logsumexp(at_masks, axis=-1))
        made = Drafts(drawn[:, n:], sure, jnp.full_like(kept, sure.shape[1]))
        new = _redraft(s.drafts.replace(count=drafts.count), made, prefixes, accepted, kept)
        tell(new.tokens, first + kept[:, None] + jnp.arange(new.tokens.shape[1])[None], new.is_draft, new.sure)
        return self._end(after.replace(drafts=new))

    def _end(self, s: DraftingState) -> DraftingState:
        """The state with the drafts of each text committed that probably ends with them: see `end_threshold`."""
        least, drafts = s.settings.end_threshold[:, None], s.drafts
        ahead = jnp.arange(drafts.tokens.shape[1])[None]
        places = self._next_place(s)[:, None] + ahead
        in_gap = self._decoded_at(s, ahead) == places
        chance = jnp.cumprod(jnp.where(drafts.is_draft & in_gap, drafts.sure, 0), axis=1)
        ends = (drafts.tokens == self.ids.eos_id) & (chance >= least) & (least < 1)
        is_greedy = s.active & (s.settings.temperature == 0)
        count = jnp.where(is_greedy & jnp.any(ends, axis=1), jnp.argmax(ends, axis=1) + 1, 0)
        after, _ = s.commit(s.cache, drafts.tokens, places, count)
        return after.replace(active=s.active & after.active, forwards=s.forwards)


def _redraft(
    old: Drafts, made: Drafts, prefixes: Int32[Array, "B G"], accepted: Int32[Array, "B"], kept: Int32[Array, "B"]
) -> Drafts:
    """The drafts after a forward pass that accepted some of the old ones, and committed `kept` tokens.

    They are those `made` by the masks after the longest prefix that was accepted, of G N masks that see `prefixes`, or
    else the old ones that were not reached.
    """
    M, N = old.tokens.shape[1], made.tokens.shape[1] // prefixes.shape[1]
    usable = jnp.where(prefixes <= accepted[:, None], prefixes, -1)
    seen, which = jnp.max(usable, axis=1), jnp.argmax(usable, axis=1)
    later = kept[:, None] + jnp.arange(M)[None]  # [B, M]
    new = made.at(which[:, None] * N + jnp.clip(later - seen[:, None], 0, N - 1), N - kept + seen)
    unreached = old.at(jnp.minimum(later, M - 1), old.count - kept)
    return select(seen >= 0, new, unreached)
