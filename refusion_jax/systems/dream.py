"""Dream (Ye et al., "Dream 7B: Diffusion Large Language Models", arXiv 2508.15487): shifted masked diffusion.

Training: noise as in masked diffusion, p = (1 - eps) t + eps per document, but a masked token is predicted by the
logits at the token *before* it, as in an autoregressive model. Every masked token n is weighted by the clean context
around it (CART): w_n = 1/2 * sum over the clean tokens i of its document, with the prompt, of q (1 - q)^(|n - i| - 1),
where q is `cart_p`.

    text       p q a b c d          the mask is a matrix of ones:
    inputs     p q a M c M          every token sees its whole document
    labels     . . b . d .          at the token before: shifted
    weight     . . w . v .          q = 0.5:  w = (1 + 1/2 + 1/4 + 1) / 4,  v = (1 + 1/4 + 1/8 + 1/16) / 4

The loss is normalized by the number of masked tokens in the batch, as in the authors' code.

Decoding: every forward pass runs over the whole text. Going from time t to s, it commits floor(n (1 - s / t)) of the n
masks, those with the highest confidence: the negative entropy of the prediction, the margin between the two most
probable tokens, or the probability of the chosen one (MaskGIT).

From the paper and the authors' code: shift, CART, normalization, times, the three rules. Our choices: the first token
of a document is never masked, as there is no token before it; steps that would commit nothing are skipped, as the next
forward pass would see the same text (with as many `steps` as tokens that is the first, and the last commits two; with
steps=0 each commits one); a row ends once all places up to an EOS are committed; confidences are those of the model
without temperature, top_k and top_p; mask and padding are never chosen; repeats of an EOS are masked one by one, where
the authors' code masks them together (see batch/masking.py: 83 instead of 46 % of the quickstart's answers).

Axes: B rows, T row length, N tokens to decode, S steps, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, Key

from refusion_jax.batch.batch import Batch
from refusion_jax.batch.rows import Rows, decayed_sum, next_in_row, text_positions
from refusion_jax.batch.visibility import Visibility
from refusion_jax.cli.settings import setting
from refusion_jax.decoding import settings as shared
from refusion_jax.decoding.reference import ReferenceDecoder
from refusion_jax.decoding.requests import Request, most_new_tokens
from refusion_jax.model.families import Release
from refusion_jax.model.interface import LanguageModel
from refusion_jax.systems import llada, masked
from refusion_jax.systems.interface import System

LAST_TIME = 1e-3  # the times of decoding run from 1 to this, as in the authors' code


@dataclasses.dataclass(frozen=True)
class ShiftedDiffusion(llada.MaskedDiffusion):
    """1 / M * sum over the M masked tokens of the batch of CART weight * CE."""

    shifted: ClassVar[bool] = True

    cart_p: float = setting(0.3, "how fast a clean token's weight falls with the distance to it", above=0, at_most=1)

    def corrupt(self, rows: Rows, keys: Key[Array, "B"]) -> Batch:
        rows, is_masked, p = self.draw(rows, keys)
        positions = text_positions(rows.segment_ids)
        is_masked = is_masked & (positions > 0)
        is_clean = (rows.segment_ids > 0) & ~is_masked
        weight = is_masked * cart_weights(is_clean, rows.segment_ids, self.cart_p)
        weight = weight / jnp.maximum(jnp.sum(is_masked), 1).astype(jnp.float32)
        return Batch(
            inputs=jnp.where(is_masked, self.mask_id, rows.tokens),
            positions=positions,
            visibility=Visibility.of(self.pattern, rows.segment_ids),
            labels=next_in_row(rows.tokens),
            weights={"mdm": next_in_row(weight)},
            diagnostics={"mask_ratio": p},
        )


def cart_weights(is_clean: Bool[Array, "B T"], segment_ids: Int32[Array, "B T"], q: float) -> Float32[Array, "B T"]:
    """1/2 * sum over the clean tokens i != n of the same document of q (1 - q)^(|n - i| - 1)."""

    def from_left(is_clean, segment_ids):
        # s_n = (1 - q) s_(n-1) + q [n - 1 is clean], from 0 where a document begins.
        is_same = (segment_ids[:, 1:] == segment_ids[:, :-1]).astype(jnp.float32)
        added, fading = (jnp.pad(x, ((0, 0), (1, 0))) for x in (q * is_same * is_clean[:, :-1], (1 - q) * is_same))
        return decayed_sum(added, fading)

    return (from_left(is_clean, segment_ids) + from_left(is_clean[:, ::-1], segment_ids[:, ::-1])[:, ::-1]) / 2


def schedule(masks: int, steps: int) -> tuple[int, ...]:
    """The number of commits of each step for a text of `masks` masks; steps without commits are left out."""
    times, left, counts = [1 - i / steps * (1 - LAST_TIME) for i in range(steps + 1)], masks, []
    for i in range(steps):
        counts.append(left if i == steps - 1 else int(left * (1 - times[i + 1] / times[i])))
        left -= counts[-1]
    return tuple(count for count in counts if count)


@dataclasses.dataclass(frozen=True)
class DreamSettings(shared.Settings):
    """How to decode a shifted masked diffusion model."""

    steps: int = setting(0, "Passes for an answer of max_new_tokens; 0: one per token", at_least=0, at_most=2**16)
    confidence: str = setting(
        "entropy",
        "What is committed first: entropy (least) | margin (of the best token over the second) | maskgit (probability)",
        scope="compiled",
        choices=("entropy", "margin", "maskgit"),
    )

    @classmethod
    def operating_points(cls, new_tokens: int, trained: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{"steps": max(1, new_tokens // tokens)} for tokens in (1, 2, 4, 8)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenoiseOnSchedule(masked.OnSchedule):
    """Commits masks on Dream's schedule of times."""

    settings: ClassVar[type[DreamSettings]] = DreamSettings

    confidence: str

    @classmethod
    def counts(cls, request: Request) -> Sequence[int]:
        masks, steps = most_new_tokens([request]), request.settings.steps
        return schedule(masks, steps) if steps else (1,) * masks

    def confidence_of(self, s: masked.MaskedText, w: masked.Window, proposal: masked.Proposal) -> Float32[Array, "B N"]:
        if self.confidence == "maskgit":
            return proposal.probability
        real = proposal.real
        log_p = real - jax.nn.logsumexp(real, axis=-1, keepdims=True)
        if self.confidence == "entropy":
            return jnp.sum(jnp.where(real > -jnp.inf, jnp.exp(log_p) * log_p, 0.0), axis=-1)
        best = jnp.exp(jax.lax.top_k(jnp.where(proposal.choosable > -jnp.inf, log_p, -jnp.inf), 2)[0])
        return best[:, :, 0] - best[:, :, 1]


def reference(model: LanguageModel, request: Request) -> dict:
    """The decoder in plain Python: one request, greedy."""
    plain = ReferenceDecoder(model, request, keeps_cache=False)

    def surety(p, place):
        if request.settings.confidence == "entropy":
            return float(np.sum(p[p > 0] * np.log(p[p > 0])))
        second, best = np.sort(plain.choosable(p, place))[-2:]
        return best - second if request.settings.confidence == "margin" else best

    masked.fill(plain, DenoiseOnSchedule.counts(request), surety, plain.places, shift=model.config.shifted)
    return plain.result()


SYSTEM = System(
    name="dream",
    objective=ShiftedDiffusion,
    decoders={"dream": DenoiseOnSchedule},
    references={"dream": reference},
    former={"eps": 1e-3},
    releases=(
        Release(
            "Dream",
            "qwen2",
            defaults={"mask_token_id": 151666, "shifted": True},
            fixed={"architectures": ["DreamModel"], "use_mrope": False},  # DreamReasoner's is another
        ),
    ),
)
