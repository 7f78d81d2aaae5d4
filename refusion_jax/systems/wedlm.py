"""WeDLM ("Reconciling Diffusion Language Models with Standard Causal Attention", arXiv 2512.22737).

Training on [x_t; x_0], both causal. In every block of x_t response tokens are masked with probability gamma ~ U(0, 1),
and the tokens are reordered: observed ones first, then masks, both in text order and with their positions in the text.
So a mask attends to all observed tokens of its block and to the clean text of earlier blocks. Masks predict their own
tokens (not shifted), with the cross-entropy weighted by 1 / gamma, summed and divided by the response tokens of the
batch; the clean half predicts next tokens (shifted), as a mean; both terms have equal weight. Example: a b c d in
blocks of two, with a and d masked:

                     b M c M a b c d
    inputs    b      1 . . . . . . .
              M      1 1 . . . . . .
              c      . . 1 . 1 1 . .
              M      . . 1 1 1 1 . .
              a      . . . . 1 . . .
              b      . . . . 1 1 . .
              c      . . . . 1 1 1 .
              d      . . . . 1 1 1 1
    labels    . a . d b c d .

Decoding, in a window of W places after the committed text. Each forward pass takes [filled places; masks], each in text
order. Filled places right after the committed ones have attended to the same tokens as in a causal forward pass, so
their keys and values are committed without a further forward pass, and as many masks are added at the end of the
window. A forward pass fills all masks with entropy + `distance_penalty` * (places after the first mask) <
`entropy_threshold`, or else the one with the smallest value.

From the paper and the authors' code: layout, both losses, order, window and rule. Our choices: gamma is at least 0.001;
the normalization, which the paper does not define; blocks are counted from the start of the row, so that the first one
of a document may be short; places after a filled EOS are neither decoded nor fed.

Axes: B rows, T row length, C cache entries, N new tokens, W window, F = 2 W fed tokens, V vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from refusion_jax.batch.batch import Batch, mean_over
from refusion_jax.batch.masking import draw_levels
from refusion_jax.batch.rows import Rows, join, next_in_row, precedes_response, row_index, text_positions
from refusion_jax.batch.visibility import CausalStreams, Visibility
from refusion_jax.cli.settings import setting
from refusion_jax.decoding import cache as kv
from refusion_jax.decoding import settings as shared
from refusion_jax.decoding.decoder import Continuer, FilledText
from refusion_jax.decoding.reference import ReferenceDecoder
from refusion_jax.decoding.requests import Layout, Request, most_new_tokens
from refusion_jax.decoding.sampling import run_length, surest
from refusion_jax.model.families import Release
from refusion_jax.model.interface import LanguageModel
from refusion_jax.systems.interface import Objective, System


@dataclasses.dataclass(frozen=True)
class ReorderedBlocks(Objective):
    """1 / R * sum over masks of CE / gamma + mean of CE over next tokens, with R response tokens in the batch."""

    coefficients: ClassVar[dict[str, float]] = {"mdm": 1.0, "ar": 1.0}
    streams: ClassVar[int] = 2  # the reordered text and the text

    block_size: int = setting(32, "tokens of a block, within which tokens are reordered", at_least=1, at_most=1024)

    @property
    def pattern(self) -> CausalStreams:
        return CausalStreams(self.block_size)

    def corrupt(self, rows: Rows, keys: Key[Array, "B"]) -> Batch:
        """Masks response tokens, with one probability per block, and moves them after the block's observed tokens."""
        index, positions = row_index(rows.tokens), text_positions(rows.segment_ids)
        start = index - jnp.minimum(positions, index % self.block_size)  # where the document's part of the block begins

        gamma, u = draw_levels(keys, rows)
        gamma = jnp.take_along_axis(gamma, start, axis=1)
        is_masked = rows.is_response & (u < gamma)
        order = jnp.argsort(2 * start + is_masked, axis=1, stable=True)

        def reorder(x):
            return jnp.take_along_axis(x, order, axis=1)

        responses = jnp.maximum(jnp.sum(rows.is_response), 1).astype(jnp.float32)
        none = jnp.zeros(u.shape)
        return Batch(
            inputs=join(reorder(jnp.where(is_masked, self.mask_id, rows.tokens)), rows.tokens),
            positions=join(reorder(positions), positions),
            visibility=Visibility.of(self.pattern, join(rows.segment_ids, rows.segment_ids)),
            labels=join(reorder(rows.tokens), next_in_row(rows.tokens)),
            weights={
                "mdm": join(reorder(is_masked / (gamma * responses)), none),
                "ar": join(none, mean_over(precedes_response(rows))),
            },
            diagnostics={"mask_ratio": join(gamma, gamma)},
        )


@dataclasses.dataclass(frozen=True)
class WindowSettings(shared.Settings):
    """How to decode in a sliding window."""

    window: int = setting(16, "Positions decoded at once", scope="compiled", at_least=1, at_most=4096)
    entropy_threshold: float = setting(
        0.4, "Masks with less entropy (in nats) than this are filled together", at_least=0, at_most=1e4
    )
    distance_penalty: float = setting(
        0.02, "Added to the entropy of a mask for each position after the first mask", at_least=0, at_most=1e4
    )
    points = [{"entropy_threshold": threshold} for threshold in (0.1, 0.2, 0.4, 0.8, 1.6)]
    points += [{"window": 8, "entropy_threshold": threshold} for threshold in (0.1, 0.2, 0.4)]  # half the places


class SlidingWindow(Continuer):
    """Fills masks in a window after the text."""

    settings: ClassVar[type[WindowSettings]] = WindowSettings
    typical: ClassVar[dict[float, float]] = {16.0: 3.41}

    @classmethod
    def width_for(cls, requests: Sequence[Request]) -> int:
        """F: the window, and filled places before it."""
        return 2 * min(requests[0].settings.window, most_new_tokens(requests))

    def init(self, model: LanguageModel, layout: Layout, keys: Key[Array, "B"]) -> FilledText:
        return self.start_text(FilledText, layout, keys, cache=kv.prefill(model, layout.given, self.chunk))

    def step(self, model: LanguageModel, s: FilledText) -> FilledText:
        """One forward pass, which commits filled places right after each row's committed tokens, and fills masks."""
        offset, end, W = jnp.arange(self.width)[None], s.length[:, None], self.width // 2
        at = s.cache.length[:, None] + offset  # [B, F] of text
        tokens = jnp.take_along_axis(s.text, at, axis=1)
        is_filled = (tokens != self.ids.mask_id) & (at < end)
        prefix = run_length(is_filled)  # [B], commits
        is_in = (offset < prefix[:, None] + W) & (at < end)
        order = jnp.argsort(jnp.where(is_filled, 0, jnp.where(is_in, 1, 2)), axis=1, stable=True)
        tokens, at, is_mask = (jnp.take_along_axis(x, order, axis=1) for x in (tokens, at, is_in & ~is_filled))

        logits, cache = kv.extend(model, s.cache, tokens, at)
        proposal = s.propose(logits, at, is_mask)
        first = jnp.min(jnp.where(is_mask, at, jnp.iinfo(jnp.int32).max), axis=1, keepdims=True)
        penalty = s.settings.distance_penalty[:, None] * (at - first)
        entropy = jnp.sum(jax.scipy.special.entr(jax.nn.softmax(proposal.real)), axis=-1)  # [B, F], in nats
        score = entropy + penalty
        fills = surest(-score, is_mask, score < s.settings.entropy_threshold[:, None])
        return s.fill(kv.commit(cache, prefix), fills, proposal.token, at)


def reference(model: LanguageModel, request: Request) -> dict:
    """The decoder in plain Python: one request, no cache, greedy."""
    plain, s = ReferenceDecoder(model, request), request.settings
    while masks := [place for place in range(plain.end) if place not in plain.text]:
        first = masks[0]
        masks = [place for place in masks if place < first + min(s.window, len(plain.places))]
        order = [*sorted(place for place in plain.text if place < plain.end), *masks]
        rows = dict(zip(masks, plain.forward("fill", plain.tokens(order), order)[-len(masks) :], strict=True))
        score = {
            place: -float(np.sum(row[row > 0] * np.log(row[row > 0]))) + s.distance_penalty * (place - first)
            for place, row in rows.items()
        }
        filled = [place for place in masks if not plain.above(score[place], s.entropy_threshold)]
        filled = filled or plain.first({place: -of_mask for place, of_mask in score.items()}, 1)
        plain.fill({place: plain.best(rows[place], place) for place in filled})
    return plain.result()


_MASK = {"mask_token_id": 151665}  # of their engine, where a config.json names none

SYSTEM = System(
    name="wedlm",
    objective=ReorderedBlocks,
    decoders={"wedlm": SlidingWindow},
    references={"wedlm": reference},
    former={"eps": 1e-3},
    releases=(
        Release("wedlm", "qwen2", defaults=_MASK, fixed={"qk_norm": False, "attention_bias": True}),
        Release("wedlm", "qwen3", defaults=_MASK, fixed={"qk_norm": True, "attention_bias": False}),
    ),
)
