"""PARD ("Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation", arXiv 2504.18583): a small model
drafts several tokens in one forward pass, a left-to-right model verifies them in one.

The drafter (`--decode.drafter=RUN`) was trained to predict tokens at masks that follow clean text, each from the place
before it, as the system `idlm` trains. It is fed what was committed since its last forward pass and M - 1 masks, and
drafts the M tokens that follow. The model verifies them by the rule of speculative sampling: greedy, the text is that
of `ar`, token by token; with a temperature it has the same distribution, whatever the drafter. Example with three
drafts, of which the last two are rejected in the first round:

    drafter    fed  p q M M            x y M M              p and q were given; x y were committed since
               drafts  x a b              c d e
    model      fed  q x a b            y c d e
               next    x y . .            c d e f
    committed       x y                c d e f

Drafters do not depend on the model that verifies: one serves all models with its tokenizer. Left out: the authors drop
masks in training, which makes it cheaper.

Axes: B rows, C cache entries, M drafts, N = M + 1 tokens that a round commits at most, V vocabulary.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int32, Key

from refusion_jax.cli.settings import setting
from refusion_jax.decoding import cache as kv
from refusion_jax.decoding import settings as shared
from refusion_jax.decoding.auxiliary import in_vocabulary
from refusion_jax.decoding.decoder import Continuation
from refusion_jax.decoding.reference import ReferenceDecoder
from refusion_jax.decoding.requests import Layout, Request
from refusion_jax.decoding.sampling import entry
from refusion_jax.model.families import Release
from refusion_jax.model.interface import LanguageModel
from refusion_jax.systems import ar
from refusion_jax.systems.interface import System


@dataclasses.dataclass(frozen=True)
class DraftedSettings(shared.Settings):
    """How to decode a left-to-right model with a drafter."""

    auxiliary_models = {"drafter": {"objective": "idlm", "idlm.block_size": 7, "model.num_hidden_layers": 1}}

    drafter: str = setting("", "Run of a smaller `idlm` model with the same tokenizer, which drafts", scope="compiled")
    draft_length: int = setting(7, "Tokens drafted at once", scope="compiled", at_least=1, at_most=4096)
    points = [{"draft_length": length} for length in (3, 7)]


@struct.dataclass
class DraftAndVerifyState(Continuation):
    """A cached text and the tokens of the last round."""

    drafter: kv.Cache
    recent: Int32[Array, "B N"]  # tokens of the last round; the last one that counts is in neither cache
    count: Int32[Array, "B"]  # how many of them count


class DraftAndVerify(ar.Speculative):
    """Verifies the drafts of another model."""

    settings: ClassVar[type[DraftedSettings]] = DraftedSettings

    def init(self, model: LanguageModel, layout: Layout, keys: Key[Array, "B"]) -> DraftAndVerifyState:
        cache, last = kv.prefill_but_last(model, layout.given, self.chunk)
        room = self.width - 2  # by which the drafter's input is longer than the model's: N tokens and M - 1 masks
        given = layout.given.replace(
            tokens=jnp.pad(layout.given.tokens, ((0, 0), (0, room))),
            positions=jnp.pad(layout.given.positions, ((0, 0), (0, room))),
            entries=None,  # those of the model, not of the drafter
        )
        drafter, _ = kv.prefill_but_last(model.drafter, given, self.chunk)
        recent = jnp.pad(last[:, None], ((0, 0), (0, self.width - 1)))
        own = {"cache": cache, "drafter": drafter, "recent": recent, "count": jnp.ones_like(last)}
        return self.start(DraftAndVerifyState, layout, keys, **own)

    def step(self, model: LanguageModel, s: DraftAndVerifyState) -> DraftAndVerifyState:
        """One forward pass of each model, after which each row commits the accepted drafts and one more token."""
        N, M = self.width, self.width - 1
        first, offset = s.next_places(1), jnp.arange(N + M - 1)[None]
        recent = jnp.pad(s.recent, ((0, 0), (0, M - 1)))
        fed = jnp.where(offset < s.count[:, None], recent, model.drafter.config.mask_token_id)  # [B, N + M - 1]
        logits, drafter = kv.extend(model.drafter, s.drafter, fed, first - s.count[:, None] + offset)
        from_token = s.count[:, None] - 1 + offset[:, :M]  # [B, M] of N + M - 1
        drafting = jnp.take_along_axis(logits, from_token[:, :, None], axis=1)
        drafting = in_vocabulary(drafting, model.drafter.config, model.config.vocab_size)
        drafts, q = self.draw_drafts(s, drafting)

        last = entry(s.recent, s.count - 1)
        after, tokens, kept = self.verify(model, s, last, drafts, jnp.full_like(last, M), q)
        return after.replace(drafter=kv.commit(drafter, s.count), recent=tokens, count=kept)


def reference(model: LanguageModel, request: Request) -> dict:
    """The decoder in plain Python: one request, no cache, greedy."""
    plain, drafter = ReferenceDecoder(model, request), ReferenceDecoder(model.drafter, request)
    masks = [model.drafter.config.mask_token_id] * (request.settings.draft_length - 1)
    drafter.text = plain.text
    while not plain.is_complete():
        text = list(plain.text.values())
        drafts = drafter.next_tokens(drafter.forward("draft", text + masks))
        plain.commit_verified(drafts, plain.next_tokens(plain.forward("verify", text + drafts)))
    plain.margin = min(plain.margin, drafter.margin)
    return plain.result()


SYSTEM = System(
    name="pard",
    decoders={"pard": DraftAndVerify},
    references={"pard": reference},
    scoring=ar.SCORING,
    decodes=("ar",),
    # Drafters: models of a family, whose masks are an unused token of its vocabulary.
    releases=tuple(
        Release(
            family,
            family,
            keys={"pard_token": "mask_token_id"},
            fixed={"spd_type": "pard"},
            ignored=("pretraining_tp", "use_mrope"),
        )
        for family in ("llama", "qwen2", "qwen3")
    ),
)
