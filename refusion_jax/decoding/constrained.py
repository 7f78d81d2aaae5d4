"""Answers under a grammar: left to right, and at each place only the tokens that the grammar allows there.

The text is that of a plain loop: at each place the model's distribution of the next token is restricted to what the
grammar allows, and the most probable token or a sample is taken. As `Decoder.next_token` says, the last token predicts
it or, for the first token of a slot, a mask at its place. The grammar runs on the host, between forward passes. To
avoid one forward pass per token, every forward pass verifies drafts: the only token that is allowed at a place, as in
the keys of a JSON schema, or else what a mask has guessed for the place, if it is allowed. As the host knows the
drafts, it knows what is allowed after each of them. The device accepts the drafts up to the first that differs from the
token that it takes itself, with the noise of the plain loop. With slots of four, one of which begins at place 12, a
last token `x` at 9 and three drafts:

    places    9 10 11 12   12 13 14 15
    tokens    x  a  b  c    M  M  M  M
    x         1  .  .  .    .  .  .  .     `x` predicts place 10, `a` 11, the first mask 12, as a slot begins there, and
    a         1  1  .  .    .  .  .  .     `c` 13. The other masks guess: if all drafts are accepted, the next ones are
    b         1  1  1  .    .  .  .  .     made of their tokens.
    c         1  1  1  1    .  .  .  .
    M         1  1  1  .    1  .  .  .     Where the last token predicts every place, the masks come after the last
    M         1  1  1  .    1  1  .  .     draft and only guess. Models without slots are fed no masks.
    M         1  1  1  .    1  1  1  .
    M         1  1  1  .    1  1  1  1

Axes: B rows, N tokens per forward at most, M = N - 1 drafts, S slots of masks, K slot size, R places of an
answer, U words of 32 bits, V vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int32, Key

from refusion_jax.cli.errors import UserError
from refusion_jax.decoding import cache as kv
from refusion_jax.decoding.decoder import SLOT_MASK, Continuation, Continuer, Decoder
from refusion_jax.decoding.queue import UNTIL_DONE, Progress, RunningBatch
from refusion_jax.decoding.requests import Layout, Request
from refusion_jax.decoding.sampling import entry, put, run_length
from refusion_jax.decoding.trajectory import tell
from refusion_jax.distributed.processes import fetch
from refusion_jax.distributed.sharding import sharding
from refusion_jax.model.interface import LanguageModel
from refusion_jax.model.shape import ModelConfig

_REACH = 8  # N, at least: with `{"key": "` in byte pairs three or four tokens are forced at a time


Matcher: TypeAlias = Any  # a grammar and the tokens that it has consumed: llguidance.LLMatcher, which is optional


@struct.dataclass
class ConstrainedState(Continuation):
    """A cached text. The host replaces `drafts`, `drafted` and `allowed` before each forward pass."""

    last: Int32[Array, "B"]  # the last token, not in the cache yet
    drafts: Int32[Array, "B M"]  # of the tokens after it
    drafted: Int32[Array, "B"]  # how many drafts there are
    allowed: Int32[Array, "B N U"]  # bits of the tokens that may be taken at each place
    guesses: Int32[Array, "B R"]  # for the places of the answer; those before the last token do not count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constrained(Continuer):
    """Verifies drafts that a grammar allows."""

    reach: int  # N
    slot_size: int  # K; 1 without slots
    from_masks: bool  # whether a mask predicts the first token of a slot

    @classmethod
    def of(cls, decoder: type[Decoder], requests: Sequence[Request], model: ModelConfig) -> Self:
        """The decoder for requests with grammars, in place of one that serves them without; UserError if it cannot."""
        s = requests[0].settings
        if not decoder.next_token:
            raise UserError(
                f"the decoder {s.method!r} does not write left to right, which a grammar needs: use "
                "a model or decoder that does"
            )
        if s.head_rows:
            s.refuse("head_rows", "leaves out tokens that a grammar may ask for: decode without it")
        for request in requests:
            if request.template or request.least or request.grammar is None:
                why = "an answer under a grammar has no gaps and no least length, and its batch no other answers"
                raise UserError(f"{request.name}: {why}")
        size, from_masks = s.slot_size, decoder.next_token == SLOT_MASK
        reach = -(-_REACH // size) * size
        width = reach + (-(-reach // size) * size if from_masks or size > 1 else 0)
        return cls.sized(requests, model, width=width, reach=reach, slot_size=size, from_masks=from_masks)

    def init(self, model: LanguageModel, layout: Layout, keys: Key[Array, "B"]) -> ConstrainedState:
        cache, last = kv.prefill_but_last(model, layout.given, self.chunk)
        B, N, U = len(last), self.reach, -(-model.config.vocab_size // 32)
        nothing = {"drafts": jnp.zeros((B, N - 1), jnp.int32), "drafted": jnp.zeros_like(last)}
        nothing |= {"allowed": jnp.zeros((B, N, U), jnp.int32), "guesses": jnp.zeros((B, self.new_tokens), jnp.int32)}
        return self.start(ConstrainedState, layout, keys, cache=cache, last=last, **nothing)

    def step(self, model: LanguageModel, s: ConstrainedState) -> ConstrainedState:
        """One forward pass, in which each row commits the accepted drafts and one more token."""
        N, K, count, offset = self.reach, self.slot_size, s.record.count[:, None], jnp.arange(self.reach)[None]
        place = count + offset  # in the answer, as all places here
        fed, at = jnp.concatenate([s.last[:, None], s.drafts], axis=1), place - 1
        visible, predicted = jnp.tril(jnp.ones((1, N, N), bool)), place
        if self.width > N:
            start = -(-count // K) * K if self.from_masks else count + s.drafted[:, None]
            start = start + K * jnp.arange((self.width - N) // K)[None]  # [B, S]
            masks = (start[:, :, None] + jnp.arange(K)[None, None]).reshape(len(start), -1)
            visible = kv.visible_to_masks(N, jnp.minimum(start - count, s.drafted[:, None]), K, K)
            fed = jnp.concatenate([fed, jnp.full_like(masks, self.ids.mask_id)], axis=1)
            at, predicted = (jnp.concatenate([x, masks], axis=1) for x in (at, place))
        begin = s.places.position[:, :1]
        logits, cache = kv.extend(model, s.cache, fed, begin + at, visible)
        if self.from_masks:
            of_masks = N + jnp.clip(place - start[:, :1], 0, self.width - N - 1)
            source = jnp.where(place % K == 0, of_masks, offset)
            logits = logits.at[:, :N].set(jnp.take_along_axis(logits, source[:, :, None], axis=1))
        logits = logits.at[:, :N].set(jnp.where(bits(s.allowed, logits.shape[2]), logits[:, :N], -jnp.inf))
        tokens = s.sampled(logits, begin + predicted)

        is_reached = offset <= s.drafted[:, None]
        agrees = (tokens[:, : N - 1] == s.drafts) & is_reached[:, 1:]
        accepted = run_length(agrees)
        tell(s.drafts, begin + place[:, : N - 1], is_reached[:, 1:])
        after, kept = s.commit(cache, tokens[:, :N], begin + place, accepted + 1)
        # After a rejected draft, the predictions of the later ones are the best guesses available (Jacobi iteration).
        guesses = put(s.guesses, predicted[:, N:], tokens[:, N:])
        guesses = put(guesses, jnp.where(is_reached, place, self.new_tokens), tokens[:, :N])
        return after.replace(last=entry(tokens, kept - 1), guesses=guesses)


def bits(words: Int32[Array, "B N U"], count: int) -> Bool[Array, "B N V"]:
    """The first V bits of the words, the lowest bit of each word first."""
    token = jnp.arange(count)[None, None]
    return (jnp.repeat(words, 32, axis=2)[:, :, :count] >> token % 32) & 1 > 0


class ConstrainedBatch(RunningBatch):
    """A batch whose rows have grammars; it runs one forward pass at a time, or none if `run` is given most=0."""

    def __init__(self, model: LanguageModel, decoder: Constrained, like: Request, rows: int, *how: Any):
        super().__init__(model, decoder, like, rows, *how)
        self._matchers: dict[int, Matcher] = {}  # of the rows that are not finished
        self._tokens = np.zeros(rows, np.int32)  # consumed by each row's matcher
        self._guesses = np.zeros((rows, decoder.new_tokens), np.int32)

    def _admit_group(self, requests: Sequence[Request], blocks: Sequence[list[bytes]]) -> list[int]:
        rows = super()._admit_group(requests, blocks)
        self._matchers |= {row: one.grammar.deep_copy() for row, one in zip(rows, requests, strict=True)}
        self._tokens[rows], self._guesses[rows] = 0, 0
        for row in rows:
            self.failed.pop(row, None)
        return rows

    def run(self, finished: int, most: int = UNTIL_DONE) -> None:
        if most:
            self._give_drafts()
        super().run(finished, min(most, 1))

    def look(self) -> Progress:
        """Waits for the forward pass, and advances the grammars over what it has committed."""
        progress, self._guesses = super().look(), np.array(fetch(self._state.guesses))
        for row, matcher in list(self._matchers.items()):
            new = progress.record.tokens[row, self._tokens[row] : progress.record.count[row]].tolist()
            self._tokens[row] += len(new)
            if progress.active[row]:
                matcher.consume_tokens(new)
            if not (progress.active[row] and self._check(row, matcher)):
                del self._matchers[row]
        return progress

    def stop(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._matchers.pop(row, None)
        super().stop(rows)

    def _give_drafts(self) -> None:
        N, s = self._decoder.reach, self._state
        drafts, drafted = np.zeros((self.rows, N - 1), np.int32), np.zeros(self.rows, np.int32)
        allowed = np.full(s.allowed.shape, -1, np.int32)
        for row, matcher in list(self._matchers.items()):
            own = self._draft(row, matcher, allowed[row])
            drafts[row, : len(own)], drafted[row] = own, len(own)
        given = {"drafts": drafts, "drafted": drafted, "allowed": allowed}
        places = {name: sharding(self._mesh, "batch", *[None] * (x.ndim - 1)) for name, x in given.items()}
        self._state = s.replace(**jax.device_put(given, places))

    def _draft(self, row: int, matcher: Matcher, allowed: Int32[np.ndarray, "N U"]) -> list[int]:
        """Drafts of a row's next tokens; writes what is allowed at their places and at the one after them."""
        drafts: list[int] = []
        guesses = self._guesses[row, self._tokens[row] :]
        last = min(len(allowed), len(guesses)) - 1
        for place in range(last + 1):
            mask = np.frombuffer(matcher.compute_bitmask(), np.int32)[: allowed.shape[1]]
            allowed[place], allowed[place, : len(mask)] = 0, mask
            is_allowed = np.unpackbits(allowed[place].view(np.uint8), bitorder="little")
            token = int(is_allowed.argmax() if np.count_nonzero(is_allowed) == 1 else guesses[place])
            if not is_allowed[token] or place == last:
                break
            drafts.append(token)
            if token == self._decoder.ids.eos_id or not matcher.consume_tokens([token]):
                break
        self._check(row, matcher)
        matcher.rollback(len(drafts) - (self._decoder.ids.eos_id in drafts))
        return drafts

    def _check(self, row: int, matcher: Matcher) -> bool:
        """Whether a row can continue; if not, the reason is kept in `failed`."""
        if error := matcher.get_error():
            self.failed[row] = UserError(f"the answer cannot continue under its grammar: {reason(error)}")
        return not error


def reason(error: object) -> str:
    """The complaint of a grammar library, as part of a sentence."""
    return " ".join(str(error).replace("<non-verbose/>", "").split())[:300]


def batch_type(decoder: Decoder) -> type[RunningBatch]:
    """The class of batches that a decoder needs."""
    return ConstrainedBatch if isinstance(decoder, Constrained) else RunningBatch
