"""Lossless drafting: the text that the model writes one token at a time, several tokens per forward.

The text is written left to right, each token predicted by the one before it. (The first token of a gap that what was
given does not lead up to is predicted by a mask, which sees all that was committed.) Slots of masks guess ahead. Each
forward pass takes the last token, N - 1 drafts of the tokens after it, and N masks for each of G prefixes of the
drafts, as if the text ended there:

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
from jaxtyping import Array, Float32, Int32, Key

from refusion_jax.cli.settings import setting
from refusion_jax.decoding import cache as kv
from refusion_jax.decoding import settings as shared
from refusion_jax.decoding.decoder import LAST_TOKEN, Continuation, Continuer
from refusion_jax.decoding.requests import Layout, Request, text_capacity
from refusion_jax.decoding.sampling import mask_logits, run_length, sample, select
from refusion_jax.decoding.trajectory import tell
from refusion_jax.distributed.chips import free_tokens
from refusion_jax.distributed.sharding import device_kind_here, shard_count_here
from refusion_jax.model.shape import ModelConfig
from refusion_jax.model.transformer import Transformer

# (slots drafted at once, 0 for a single mask; prefixes followed by masks) -> share of the drafts that are accepted, as
# measured with slots of 8 (benchmarks/results/dense.md).
_ACCEPTED = {(0, 1): 0.0, (1, 1): 0.53, (1, 2): 0.54, (2, 2): 0.33}
_OVERHEAD = 16  # tokens of arithmetic that the rest of a forward pass takes, at the least


@dataclasses.dataclass(frozen=True)
class DraftSettings(shared.Settings):
    """How to decode a dense model left to right."""

    slot_size: int = setting(8, "Tokens per slot", scope="compiled", at_least=1, at_most=4096)
    fed_tokens: int = setting(
        0, "Tokens computed per row and forward pass, at most: 2, 3 or 6 slots of drafts and masks; with fewer than 2 "
        "slots it writes one token at a time; 0: whatever is fastest on this device. The text is always the same",
        scope="compiled", at_least=0, at_most=2**16,
    )  # fmt: skip

    @classmethod
    def operating_points(cls, new_tokens: int, trained: Mapping[str, Any]) -> list[dict[str, Any]]:
        size = max(trained["sizes"])
        return [{"slot_size": size, "fed_tokens": fed} for fed in (1, 2 * size, 3 * size, 6 * size)]


@struct.dataclass
class State(Continuation):
    """The state of the decoding loop."""

    pending: Int32[Array, "B"]  # the last token, not in the cache yet
    place: Int32[Array, "B"]  # its position in the text
    drafts: Int32[Array, "B M"]  # of the tokens after it
    sure: Float32[Array, "B M"]  # the highest probability of each draft's mask
    drafted: Int32[Array, "B"]  # how many drafts there are

    @property
    def rounds(self) -> Int32[Array, "B"]:
        """Every token counts as a round: as many as one token at a time takes."""
        return self.record.count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting(Continuer):
    """The decoder with its compiled sizes."""

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
        width = reach * (1 + prefixes)
        return dataclasses.replace(own, width=width, cache_length=text_capacity(requests) + width)

    @classmethod
    def settings_for(cls, fed: float, new_tokens: int, slot_size: int = 8) -> dict[str, Any]:
        return {"fed_tokens": int(fed)}

    @property
    def most(self) -> tuple[int, int]:
        """(N, G) of the widest forward pass."""
        return max(self._choices)

    @property
    def _choices(self) -> dict[tuple[int, int], float]:
        """(N, G) -> tokens per forward, of the forward passes that the settings allow."""
        fitting = {
            (reach := slots * self.slot_size or 1, min(prefixes, reach)): 1 + share * (slots * self.slot_size - 1)
            for (slots, prefixes), share in _ACCEPTED.items()
            if not slots or not self.fed_tokens or slots * self.slot_size * (1 + prefixes) <= self.fed_tokens
        }
        return {max(fitting): 1.0} if self.fed_tokens else fitting

    def shape(self, model: Transformer, rows: int) -> tuple[int, int]:
        """(N, G) of a forward pass with this many rows: most tokens in a time that grows with all that is fed."""
        free = free_tokens(model.weight_bytes, device_kind_here(), model.operand_dtype.itemsize)
        rows = rows // shard_count_here("batch")

        def speed(choice):
            reach, prefixes = choice
            return self._choices[choice] / (max(free, _OVERHEAD) + rows * reach * (1 + prefixes))

        return max(self._choices, key=speed)

    def init(self, model: Transformer, layout: Layout, keys: Key[Array, "B"]) -> State:
        """The initial state: all that is given is prefilled, and the first token committed."""
        given, N, P = layout.given, self.most[0], kv.tokens_at_once(self.chunk)
        B = len(given.length)
        before = jnp.maximum(given.length - P, 0)  # prefilled without masks
        cache = kv.prefill(model, given.replace(length=before), P)
        index = jnp.minimum(before[:, None] + jnp.arange(P)[None], given.tokens.shape[1] - 1)
        tokens, places = (jnp.take_along_axis(x, index, axis=1) for x in (given.tokens, given.positions))
        last = given.length - before - 1

        none = {"drafts": jnp.zeros((B, N - 1), jnp.int32), "sure": jnp.zeros((B, N - 1), jnp.float32)}
        none |= {"drafted": jnp.zeros_like(last)}
        own = {"pending": _at(tokens, last), "place": _at(places, last)} | none
        s = State.start(layout, keys, self.width, cache=cache, **own)

        prefixes = jnp.zeros((B, 1), jnp.int32)
        ahead = _masks(self._next_place(s), prefixes, N)
        fed = jnp.concatenate([tokens, jnp.full(ahead.shape, self.ids.mask_id)], axis=1)
        visible = kv.visible_to_masks(P, prefixes + last[:, None], N, self.slot_size)
        x, new = model.extend_hidden(
            fed, jnp.concatenate([places, ahead], axis=1), cache.entries, cache.length, visible
        )
        x = jnp.concatenate([jnp.take_along_axis(x, last[:, None, None], axis=1), x[:, P:]], axis=1)
        after = self._advance(s, cache, model.logits(x), prefixes, 1)
        cache = kv.Cache(kv.write(cache, new).entries, given.length)
        return after.replace(cache=cache, forwards=s.forwards)

    def step(self, model: Transformer, s: State) -> State:
        """One forward pass, in which each row commits the accepted drafts and one more token, and makes new drafts."""
        N, G = self.shape(model, len(s.pending))
        drafts, sure = s.drafts[:, : N - 1], s.sure[:, : N - 1]
        first = self._next_place(s)
        drafted = jnp.minimum(jnp.where(first == s.place + 1, s.drafted, 0), N - 1)

        # The probability that exactly so many drafts are accepted.
        accepts = jnp.where(jnp.arange(N - 1)[None] < drafted[:, None], sure, 0)
        accepts = jnp.pad(accepts, ((0, 0), (1, 1)), constant_values=((0, 0), (1, 0)))
        prefixes = jax.lax.top_k(jnp.cumprod(accepts[:, :-1], axis=1) * (1 - accepts[:, 1:]), G)[1]

        ahead = _masks(first, prefixes, N)
        fed = jnp.concatenate([s.pending[:, None], drafts, jnp.full(ahead.shape, self.ids.mask_id)], axis=1)
        places = jnp.concatenate([s.place[:, None], first[:, None] + jnp.arange(N - 1)[None], ahead], axis=1)
        visible = kv.visible_to_masks(N, prefixes, N, self.slot_size)
        logits, cache = kv.extend(model, s.cache, fed, places, visible)
        return self._advance(s.replace(drafted=drafted), cache, logits, prefixes, N)

    def _next_place(self, s: State) -> Int32[Array, "B"]:
        return _at(s.places.position, jnp.minimum(s.record.count, self.new_tokens - 1))

    def _advance(
        self, s: State, cache: kv.Cache, logits: Float32[Array, "B _ V"], prefixes: Int32[Array, "B G"], n: int
    ) -> State:
        """The next state, from one with as many drafts as were fed, and the cache that the forward pass has written to.

        The logits are those at the n verified places, the last token and the drafts, and then at the masks.
        """
        offset, first = jnp.arange(n)[None], self._next_place(s)
        N = (logits.shape[1] - n) // prefixes.shape[1]
        ahead = jnp.concatenate([offset + 0 * first[:, None], _masks(0 * first, prefixes, N)], axis=1)
        places, index = first[:, None] + ahead, jnp.minimum(s.record.count[:, None] + ahead, self.new_tokens - 1)
        may_end = s.places.may_end(jnp.take_along_axis(s.places.position, index, axis=1))
        _, choosable = mask_logits(logits, may_end, self.ids)
        is_led_up_to = (first == s.place + 1)[:, None]
        choosable = choosable.at[:, 0].set(jnp.where(is_led_up_to, choosable[:, 0], choosable[:, n]))
        drawn = sample(choosable, jnp.ones_like(places, bool), s.keys, places, s.settings)

        places, tokens, drafts = places[:, :n], drawn[:, :n], s.drafts[:, : n - 1]
        is_draft = offset[:, : n - 1] < s.drafted[:, None]
        accepted = run_length((tokens[:, : n - 1] == drafts) & is_draft)
        tell(drafts, places[:, : n - 1], is_draft)
        adjacent = jnp.take_along_axis(s.places.position, index[:, :n], axis=1) == places
        room = run_length(adjacent)  # in this gap
        after, kept = s.commit(cache, tokens, places, jnp.minimum(accepted + 1, room), self.ids.eos_id)

        last = jnp.maximum(kept - 1, 0)
        new = {"pending": _at(tokens, last), "place": _at(places, last), "drafted": jnp.zeros_like(kept)}
        if N > 1:
            sure = jnp.exp(jnp.max(choosable, axis=-1) - jax.nn.logsumexp(choosable, axis=-1))
            new |= self._next_drafts(s, drawn[:, n:], sure[:, n:], prefixes, accepted, kept)
            offset = jnp.arange(new["sure"].shape[1])[None]
            is_new = offset < new["drafted"][:, None]
            tell(new["drafts"], new["place"][:, None] + 1 + offset, is_new, new["sure"])
        return s.renewed(after, **new)

    def _next_drafts(
        self,
        s: State,
        drawn: Int32[Array, "B W"],
        sure: Float32[Array, "B W"],
        prefixes: Int32[Array, "B G"],
        accepted: Int32[Array, "B"],
        kept: Int32[Array, "B"],
    ) -> dict[str, Array]:
        """Drafts of the tokens after the committed ones: by the masks after the longest prefix that was accepted, or
        else those that were not reached.

        At the W = N G masks, which see `prefixes` drafts, `drawn` tokens were taken, and `sure` is the highest
        probability. There were `accepted` drafts, and `kept` tokens were committed.
        """
        M, N = s.drafts.shape[1], drawn.shape[1] // prefixes.shape[1]
        usable = jnp.where(prefixes <= accepted[:, None], prefixes, -1)
        seen, which = jnp.max(usable, axis=1), jnp.argmax(usable, axis=1)
        later = kept[:, None] + jnp.arange(M)[None]  # [B, M]
        at = which[:, None] * N + jnp.clip(later - seen[:, None], 0, N - 1)
        made = {name: jnp.take_along_axis(x, at, axis=1) for name, x in (("drafts", drawn), ("sure", sure))}
        left, has_masks = jnp.minimum(later, M - 1), seen >= 0
        unreached = {name: jnp.take_along_axis(getattr(s, name), left, axis=1) for name in made}
        count = jnp.where(has_masks, N - kept + seen, s.drafted - kept)
        return select(has_masks, made, unreached) | {"drafted": jnp.clip(count, 0, M)}


def _masks(first: Int32[Array, "B"], prefixes: Int32[Array, "B G"], N: int) -> Int32[Array, "B _"]:
    """The places of the masks after each prefix, G * N of them; `first` is that of the first draft."""
    places = (first[:, None] + prefixes)[:, :, None] + jnp.arange(N)[None, None]
    return places.reshape(len(first), -1)


def _at(x: Int32[Array, "B T"], index: Int32[Array, "B"]) -> Int32[Array, "B"]:
    """The element of each row at its index."""
    return jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]
