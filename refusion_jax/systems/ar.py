"""The autoregressive baseline, on the same transformer and the same rows as all other systems.

Trained by next-token prediction (causal attention, mean over the response tokens of the batch). Decoded left to right,
one token per forward.

Axes: B rows, T row length, N tokens per forward at most, M = N - 1 drafts, V vocabulary.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int32, Key

from refusion_jax.batch.batch import Batch, mean_over
from refusion_jax.batch.rows import Rows, next_in_row, precedes_response, text_positions
from refusion_jax.batch.visibility import CAUSAL, Pattern, Visibility
from refusion_jax.cli.errors import UserError
from refusion_jax.decoding import cache as kv
from refusion_jax.decoding import sampling
from refusion_jax.decoding.decoder import LAST_TOKEN, Continuation, Continuer
from refusion_jax.decoding.reference import ReferenceDecoder
from refusion_jax.decoding.requests import Layout, Request
from refusion_jax.model.interface import LanguageModel
from refusion_jax.systems.interface import PLAIN, Objective, ScoredText, ScoredTokens, Scoring, System


@dataclasses.dataclass(frozen=True)
class NextToken(Objective):
    """Predicts every response token from the token before it."""

    coefficients: ClassVar[dict[str, float]] = {"ar": 1.0}
    pattern: ClassVar[Pattern] = CAUSAL

    mask_id: int = -1  # not used

    def corrupt(self, rows: Rows, keys: Key[Array, "B"]) -> Batch:
        """The unchanged rows, each token labelled with the next one of its document; uses no noise."""
        return Batch(
            inputs=rows.tokens,
            positions=text_positions(rows.segment_ids),
            visibility=Visibility.of(self.pattern, rows.segment_ids),
            labels=next_in_row(rows.tokens),
            weights={"ar": mean_over(precedes_response(rows))},
        )


@struct.dataclass
class LeftToRightState(Continuation):
    """A cached text and its last token."""

    last: Int32[Array, "B"]  # the last token, not in the cache yet


class LeftToRight(Continuer):
    """Commits one token per forward."""

    next_token: ClassVar[str] = LAST_TOKEN

    @classmethod
    def width_for(cls, requests: Sequence[Request]) -> int:
        """N: the last token and, in decoders that verify drafts, those."""
        return 1 + requests[0].settings.draft_length

    def init(self, model: LanguageModel, layout: Layout, keys: Key[Array, "B"]) -> LeftToRightState:
        cache, last = kv.prefill_but_last(model, layout.given, self.chunk)
        return self.start(LeftToRightState, layout, keys, cache=cache, last=last)

    def step(self, model: LanguageModel, s: LeftToRightState) -> LeftToRightState:
        place = s.next_places(1)
        logits, cache = kv.extend(model, s.cache, s.last[:, None], place - 1)
        token = s.sampled(logits, place)
        after, _ = s.commit(cache, token, place, jnp.ones_like(s.last))
        return after.replace(last=token[:, 0])


class Speculative(LeftToRight):
    """The base of decoders whose drafts the model verifies; they say where drafts come from."""

    def draw_drafts(self, s: Continuation, logits: Array) -> tuple[Array, Array]:
        """(drafts of the next tokens, [B, M], from a drafter's logits; the distributions they come from, [B, M, V])."""
        places = s.next_places(self.width - 1)
        q = sampling.distribution(s.choosable(logits, places), s.settings)
        return sampling.draw(q, s.keys, places, s.settings), q

    def verify(
        self, model: LanguageModel, s: Continuation, last: Array, drafts: Array, drafted: Array, q: Array
    ) -> tuple[Continuation, Array, Array]:
        """Commits accepted drafts and one more token by a forward pass: (the next state, [B, N] tokens, their number).

        `last` is the last token, which is not in the cache yet; the others are as for `sampling.verify`.
        """
        places = s.next_places(self.width)
        logits, cache = kv.extend(model, s.cache, jnp.concatenate([last[:, None], drafts], axis=1), places - 1)
        p = sampling.distribution(s.choosable(logits, places), s.settings)
        accepted, tokens = sampling.verify(p, q, drafts, drafted, s.keys, places, s.settings)
        after, kept = s.commit(cache, tokens, places, accepted + 1)
        return after, tokens, kept


def reference(model: LanguageModel, request: Request, from_masks: Collection[int] = ()) -> dict:
    """One token per forward in plain Python: one request, no cache, greedy. Gaps are filled in text order.

    A token is predicted by the one before it in the text if that was committed last, otherwise (in decoders that fill
    gaps) and at the places `from_masks` by a mask. Both see all committed tokens.
    """
    plain = ReferenceDecoder(model, request)
    for place in plain.places:
        mask = [place] if place in from_masks or next(reversed(plain.text)) != place - 1 else []
        fed = [*plain.text, *mask]
        plain.text[place] = plain.best(plain.forward("next", plain.tokens(fed), fed)[-1], place)
        if plain.has_ended:
            break
    return plain.result()


def scoring_forward(text: ScoredText) -> ScoredTokens:
    """The pass that scores a text: each token is predicted from the one before it; UserError for an empty prompt."""
    if not len(text.prompt):
        raise UserError(f"{text.name}: a left-to-right model needs at least one token of prompt before what it scores")
    tokens = np.concatenate([text.prompt, text.continuation])
    index = np.arange(len(tokens) - 1, dtype=np.int32)
    places = index + 1 - len(text.prompt)
    return ScoredTokens(
        tokens=tokens[:-1],
        positions=index,
        rank=index,
        group=np.zeros_like(index),
        labels=tokens[1:],
        weights=(places >= 0).astype(np.float32),
        places=places,
    )


SCORING = Scoring(scoring_forward, needs_prompt=True)  # also for decoders that write the same text

SYSTEM = System(
    name="ar",
    objective=NextToken,
    decoders={"ar": LeftToRight},
    references={"ar": reference},
    scoring=SCORING,
    decodes=(PLAIN,),
)
