"""CARD (arXiv 2601.22031): masked diffusion with causal attention, one stream, and a loss at every position.

Training on rows whose responses end in noise: per document t ~ U(0, 1), and N = max(1, floor(L t)) of its L response
tokens are masked, uniformly among the last min(L, floor(lambda N)) of them (soft tail). Every response token, masked or
not, is predicted causally at the token before it (shifted). Its cross-entropy is weighted by w_n = 1 / (beta + S_n);
the sum is divided by the number of them in the batch. S_n counts the masks in its context, with more weight on near
ones: C_i = 1[i is masked] (1 + 1[i - 1 is masked]), S_n = C_n + (1 - p) S_{n-1}, starting at 0 in each document.

    text       p q a b c d          the mask is causal      1 . . . . .
    inputs     p q a M c M                                  1 1 . . . .
    labels     . a b c d .                                  1 1 1 . . .
                                                            1 1 1 1 . .
                                                            1 1 1 1 1 .
                                                            1 1 1 1 1 1

Decoding, in blocks of K masks after the text, with at most T passes a block: each pass reveals the tokens with
p > `threshold`, and the last pass all that are left. One more pass over the finished block commits its keys and values.
The first token of a block is predicted at the last token of the text before it, the others at the place before theirs.

From the paper: noise, weights, blocks and passes. Our choices: C_n itself counts in w_n, in which the formulas of the
paper differ; the sum is divided by the predicted tokens, as it does not define the normalization; at temperature 0 a
pass that would reveal nothing is taken as the last, since later ones would see the same text; places after a
revealed EOS are not decoded.

Axes: B rows, T row length, C cache entries, N new tokens, K block length, V vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32, Key

from refusion_jax.batch.batch import Batch, mean_over
from refusion_jax.batch.rows import (
    Rows,
    decayed_sum,
    document_start,
    next_in_row,
    per_document_sum,
    precedes_response,
    row_index,
    text_positions,
)
from refusion_jax.batch.visibility import CAUSAL, Pattern, Visibility
from refusion_jax.cli.settings import setting
from refusion_jax.decoding import cache as kv
from refusion_jax.decoding import settings as shared
from refusion_jax.decoding.decoder import Continuer, FilledText
from refusion_jax.decoding.reference import ReferenceDecoder
from refusion_jax.decoding.requests import Layout, Request
from refusion_jax.model.interface import LanguageModel
from refusion_jax.systems.interface import Objective, System


@dataclasses.dataclass(frozen=True)
class SoftTail(Objective):
    """1 / R * sum over the R response tokens of the batch with one before them of CE / (beta + S_n)."""

    coefficients: ClassVar[dict[str, float]] = {"mdm": 1.0}
    pattern: ClassVar[Pattern] = CAUSAL

    tail: float = setting(
        1.5, "masks lie among the last `tail` times their number of tokens (lambda)", at_least=1, at_most=1e6
    )
    beta: float = setting(1.0, "beta in the weight 1 / (beta + masks in the context)", above=0, at_most=1e6)
    decay: float = setting(0.5, "how fast the count of a mask decays with distance (p)", at_least=0, at_most=1)

    def corrupt(self, rows: Rows, keys: Key[Array, "B"]) -> Batch:
        """Masks tokens near the ends of responses; each response token is labelled at the token before it."""
        is_masked, ratio = self._draw(rows, keys)
        positions = text_positions(rows.segment_ids)
        follows = positions > 0  # a token of its document
        is_second = jnp.pad(is_masked[:, :-1], ((0, 0), (1, 0))) & follows
        counts = decayed_sum(is_masked * (1.0 + is_second), follows * (1.0 - self.decay))  # S_n
        return Batch(
            inputs=jnp.where(is_masked, self.mask_id, rows.tokens),
            positions=positions,
            visibility=Visibility.of(self.pattern, rows.segment_ids),
            labels=next_in_row(rows.tokens),
            weights={"mdm": mean_over(precedes_response(rows)) / (self.beta + next_in_row(counts))},
            diagnostics={"mask_ratio": ratio},
        )

    def _draw(self, rows: Rows, keys: Key[Array, "B"]) -> tuple[Bool[Array, "B T"], Float32[Array, "B T"]]:
        """(which tokens are masked, the masked share of each document)."""
        T = rows.tokens.shape[1]
        index, document = row_index(rows.tokens), document_start(rows.segment_ids)

        def draw(key):
            t_key, rank_key = jax.random.split(key)
            return jax.random.uniform(t_key, (T,)), jax.random.bits(rank_key, (T,))

        t, rank = jax.vmap(draw)(keys)
        t = jnp.take_along_axis(t, document, axis=1)
        length = per_document_sum(rows.is_response, rows.segment_ids)  # L
        count = jnp.maximum(jnp.floor(length * t), 1)  # N
        window = jnp.minimum(length, jnp.floor(self.tail * count))
        left = document + per_document_sum(jnp.ones_like(index), rows.segment_ids) - index  # from here to the end
        in_tail = rows.is_response & (left <= window)
        # The first N tokens of a document's tail by rank; its other tokens are sorted after the tail.
        order = jnp.lexsort((rank, 2 * document + ~in_tail), axis=1)
        place = jnp.argsort(order, axis=1) - document
        return in_tail & (place < count), count / jnp.maximum(length, 1)


@dataclasses.dataclass(frozen=True)
class PassSettings(shared.Settings):
    """How to decode in blocks of masks."""

    draft_length: int = setting(16, "Masks of a block", scope="compiled", at_least=1, at_most=4096)
    passes: int = setting(8, "Forward passes over a block's masks, at most", at_least=1, at_most=2**20)
    threshold: float = setting(0.9, "Tokens more probable than this are revealed", at_least=0, at_most=1)
    points = [{"threshold": threshold} for threshold in (0.95, 0.9, 0.7, 0.5)]
    points += [{"draft_length": 8, "threshold": threshold} for threshold in (0.9, 0.7)]


@struct.dataclass
class CausalBlocksState(FilledText):
    """The text, and the passes over each row's block."""

    passed: Int32[Array, "B"]  # forward passes over this block's masks


class CausalBlocks(Continuer):
    """Fills causal blocks, in a few passes each."""

    settings: ClassVar[type[PassSettings]] = PassSettings
    typical: ClassVar[dict[float, float]] = {16.0: 4.66}

    @classmethod
    def width_for(cls, requests: Sequence[Request]) -> int:
        return requests[0].settings.draft_length

    def init(self, model: LanguageModel, layout: Layout, keys: Key[Array, "B"]) -> CausalBlocksState:
        cache, last = kv.prefill_but_last(model, layout.given, self.chunk)
        return self.start_text(CausalBlocksState, layout, keys, cache=cache, passed=jnp.zeros_like(last))

    def step(self, model: LanguageModel, s: CausalBlocksState) -> CausalBlocksState:
        """One forward pass over each row's block: reveals tokens, or commits a finished block."""
        K = self.width
        at = s.cache.length[:, None] + jnp.arange(K)[None]  # [B, K]; each predicts the token after it
        is_mask = jnp.take_along_axis(s.masks, at + 1, axis=1)
        is_open = jnp.any(is_mask, axis=1)

        logits, cache = kv.extend(model, s.cache, jnp.take_along_axis(s.text, at, axis=1), at)
        proposal = s.propose(logits, at + 1, is_mask)
        reveals = is_mask & (proposal.probability > s.settings.threshold[:, None])
        is_stuck = ~jnp.any(reveals, axis=1) & (s.settings.temperature == 0)
        is_last = (s.passed + 1 >= s.settings.passes) | is_stuck
        reveals = jnp.where(is_last[:, None], is_mask, reveals)
        cache = kv.commit(cache, jnp.where(is_open, 0, K))
        after = s.fill(cache, reveals, proposal.token, at + 1)
        return after.replace(passed=jnp.where(is_open, s.passed + 1, 0))


def reference(model: LanguageModel, request: Request) -> dict:
    """The decoder in plain Python: one request, no cache, greedy."""
    plain, s = ReferenceDecoder(model, request), request.settings
    start = len(plain.given)
    while start < plain.end:
        for left in reversed(range(s.passes)):
            p = plain.forward("reveal", plain.tokens(range(start + s.draft_length)))
            block = range(start, min(start + s.draft_length, plain.end))
            best = {place: plain.best(p[place - 1], place) for place in block if place not in plain.text}
            sure = {place: token for place, token in best.items() if plain.above(p[place - 1][token], s.threshold)}
            plain.fill(sure if sure and left else best)
            if all(place in plain.text for place in block if place < plain.end):
                break
        start += s.draft_length
        if start < plain.end:
            plain.phases.append("commit")
    return plain.result()


SYSTEM = System(
    name="card",
    objective=SoftTail,
    decoders={"card": CausalBlocks},
    references={"card": reference},
    former={"own_mask": True},
)
