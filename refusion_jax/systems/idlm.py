"""I-DLM ("Introspective Diffusion Language Models", arXiv 2604.11035): a causal model that verifies its own drafts.

Training on [x_t; x_0], where x_t consists of masks only, in blocks of b. Both halves are shifted: a token is predicted
at the place before it. The clean half predicts next tokens. Mask j of the block that starts at s attends to the clean
text before s and to the masks up to itself, and predicts the token at s + j + 1. The loss is the mean over the response
tokens that masks predict, plus `clean_weight` times the mean over those that clean tokens predict. Example: a b c d in
blocks of two (row: query):

                     M M M M a b c d
    inputs    M      1 . . . . . . .
              M      1 1 . . . . . .
              M      . . 1 . 1 1 . .
              M      . . 1 1 1 1 . .
              a      . . . . 1 . . .
              b      . . . . 1 1 . .
              c      . . . . 1 1 1 .
              d      . . . . 1 1 1 1
    labels    b c d . b c d .

Decoding with stride N: each forward pass takes [pending token, N - 1 drafts, N - 1 masks]. This is speculative sampling
with p at the pending token and the drafts, and q of the masks that made the drafts: from the left, a draft is accepted
with probability min(1, p / q); the first rejected one is drawn again from max(0, p - q), and the next forward pass
starts with this token and masks, without drafts. If all drafts are accepted, the last one gives one more token, and the
masks after it N - 1 new drafts. So the text is distributed by p; decoded greedily, it is that of `ar` with the same
weights, token by token.

From the authors' code (github.com/thuEcstasy/I-DLM, 3342a17): layout, shift, both means and their weights, stride, the
rule of acceptance, the cold start after a rejection; we have not read the paper. They leave prompts unmasked in x_t;
here prompts are masked, too, and their last mask predicts the first token of the answer. Our other choices: top_k
and top_p apply to both p and q, so that the text stays distributed by p; blocks are counted from the start of the row,
not of the document, so that the first one of a document may be short; the weight of the clean half is constant, whereas
they can also balance both halves. Left out: their options to accept more than the rule allows.

Axes: B rows, T row length, C cache entries, N stride, W = 2 N - 1 fed tokens, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float32, Int32, Key

from refusion_jax.batch.batch import Batch, mean_over
from refusion_jax.batch.rows import Rows, join, next_in_row, precedes_response, text_positions
from refusion_jax.batch.visibility import CausalStreams, Visibility
from refusion_jax.cli.settings import setting
from refusion_jax.decoding import cache as kv
from refusion_jax.decoding import sampling
from refusion_jax.decoding import settings as shared
from refusion_jax.decoding.decoder import LAST_TOKEN, Continuation, Continuer
from refusion_jax.decoding.reference import ReferenceDecoder
from refusion_jax.decoding.requests import Layout, Request
from refusion_jax.decoding.trajectory import tell
from refusion_jax.model.families import Release
from refusion_jax.model.interface import LanguageModel
from refusion_jax.model.shape import ModelConfig
from refusion_jax.systems import ar
from refusion_jax.systems.interface import Objective, System

_BLOCK = 3


@dataclasses.dataclass(frozen=True)
class AllMasked(Objective):
    """Mean CE of what masks predict + clean_weight * mean CE of what clean tokens predict; both shifted."""

    streams: ClassVar[int] = 2  # masks and the text

    block_size: int = setting(_BLOCK, "masks of a block: the stride of decoding, less one", at_least=1, at_most=64)
    clean_weight: float = setting(
        0.2, "weight of the next-token term, relative to that of the masks", at_least=0, at_most=1e6
    )

    @property
    def coefficients(self) -> dict[str, float]:
        return {"mdm": 1.0, "ar": self.clean_weight}

    @property
    def pattern(self) -> CausalStreams:
        return CausalStreams(self.block_size)

    def corrupt(self, rows: Rows, keys: Key[Array, "B"]) -> Batch:
        """[masks; rows], each place labelled with the next token of its document; uses no noise."""
        weight = mean_over(precedes_response(rows))
        return Batch(
            inputs=join(jnp.full_like(rows.tokens, self.mask_id), rows.tokens),
            positions=join(*[text_positions(rows.segment_ids)] * 2),
            visibility=Visibility.of(self.pattern, join(rows.segment_ids, rows.segment_ids)),
            labels=join(*[next_in_row(rows.tokens)] * 2),
            weights={"mdm": join(weight, 0 * weight), "ar": join(0 * weight, weight)},
        )


@dataclasses.dataclass(frozen=True)
class StrideSettings(shared.Settings):
    """How to decode a model that verifies its own drafts."""

    stride: int = setting(
        0, "Tokens per forward, at most; all but one are verified drafts; 0: one more than the masks of "
        f"a block in training, or {_BLOCK + 1} if unknown", scope="compiled", at_least=0, at_most=65,
    )  # fmt: skip

    @classmethod
    def operating_points(cls, new_tokens: int, trained: Mapping[str, Any]) -> list[dict[str, Any]]:
        most = trained["block_size"] + 1
        return [{"stride": stride} for stride in range(2, most + 1)]

    def for_model(self, model: ModelConfig) -> Self:
        return dataclasses.replace(self, stride=self.stride or 1 + (model.block_size or _BLOCK))


@struct.dataclass
class DraftAndCheckState(Continuation):
    """A cached text, its pending token and drafts."""

    pending: Int32[Array, "B"]  # the last token, not in the cache yet
    drafts: Int32[Array, "B M"]  # M = N - 1 tokens after it
    q: Float32[Array, "B M V"]  # the distribution that each draft was sampled from
    drafted: Int32[Array, "B"]  # how many there are: N - 1, or none after a rejection


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftAndCheck(Continuer):
    """Verifies the drafts of its own masks."""

    settings: ClassVar[type[StrideSettings]] = StrideSettings
    next_token: ClassVar[str] = LAST_TOKEN
    typical: ClassVar[dict[float, float]] = {7.0: 2.56}

    stride: int  # N

    @classmethod
    def width_for(cls, requests: Sequence[Request]) -> int:
        """W: the pending token, N - 1 drafts, N - 1 masks."""
        return 2 * requests[0].settings.stride - 1

    def init(self, model: LanguageModel, layout: Layout, keys: Key[Array, "B"]) -> DraftAndCheckState:
        cache, last = kv.prefill_but_last(model, layout.given, self.chunk)
        B, M, V = len(last), self.stride - 1, model.config.vocab_size
        none = {"drafts": jnp.zeros((B, M), jnp.int32), "q": jnp.zeros((B, M, V), jnp.float32)}
        none |= {"pending": last, "drafted": jnp.zeros_like(last)}
        return self.start(DraftAndCheckState, layout, keys, cache=cache, **none)

    def step(self, model: LanguageModel, s: DraftAndCheckState) -> DraftAndCheckState:
        """One forward pass, in which each row commits the accepted drafts and one more token, and makes new drafts."""
        N, offset = self.stride, jnp.arange(self.width)[None]
        is_draft = (offset > 0) & (offset <= s.drafted[:, None])
        fed = jnp.where(is_draft, jnp.pad(s.drafts, ((0, 0), (1, N - 1))), self.ids.mask_id).at[:, 0].set(s.pending)
        places = s.next_places(self.width)  # those after the pending token
        logits, cache = kv.extend(model, s.cache, fed, places - 1)
        choosable = s.choosable(logits, places)
        likely = sampling.distribution(choosable, s.settings)

        # p[i] verifies draft i; the p after the last draft gives one more token if all are accepted.
        verified = places[:, :N]
        accepted, tokens = sampling.verify(likely[:, :N], s.q, s.drafts, s.drafted, s.keys, verified, s.settings)
        after, _ = s.commit(cache, tokens, verified, accepted + 1)

        # If nothing was rejected, the masks after the drafts are at the places of the next drafts.
        from_mask = s.drafted[:, None] + 1 + offset[:, : N - 1]  # [B, N - 1] of W
        q = jnp.take_along_axis(likely, from_mask[:, :, None], axis=1)
        at = jnp.take_along_axis(places, from_mask, axis=1)
        drafts = sampling.draw(q, s.keys, at, s.settings)
        of_masks = jnp.take_along_axis(choosable, from_mask[:, :, None], axis=1)
        is_kept = accepted == s.drafted
        tell(drafts, at, jnp.broadcast_to(is_kept[:, None], at.shape), sampling.probability(of_masks, drafts))
        drafted = jnp.where(is_kept, N - 1, 0)
        return after.replace(pending=tokens[:, -1], drafts=drafts, q=q, drafted=drafted)


def reference(model: LanguageModel, request: Request) -> dict:
    """The decoder in plain Python: one request, no cache, greedy."""
    plain, drafts = ReferenceDecoder(model, request), []
    masks = [plain.ids.mask_id] * (request.settings.stride - 1)
    while not plain.is_complete():
        best = plain.next_tokens(plain.forward("draft", [*plain.text.values(), *drafts, *masks]))
        accepted = plain.commit_verified(drafts, best)
        drafts = best[len(drafts) + 1 :] if accepted == len(drafts) else []
    return plain.result()


SYSTEM = System(
    name="idlm",
    objective=AllMasked,
    decoders={"idlm": DraftAndCheck},
    references={"idlm": reference},
    scoring=ar.SCORING,
    block_key="block_size",
    # Released in SDAR's format, but with blocks of 1, 2 or 3 masks; SDAR's are longer.
    releases=tuple(
        Release("sdar", "qwen3", fixed={"block_size": n}, ignored=("fuse_cross_entropy",)) for n in (1, 2, 3)
    ),
)
