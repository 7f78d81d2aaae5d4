"""APD (Israel et al., arXiv 2506.00413): a masked diffusion model drafts, a small left-to-right model verifies.

Decoding: the next `lookahead` places are masks, and one pass of the model drafts a token for each, independently of
the others. The verifier, a model of the system `ar` with the same tokenizer (`--decode.verifier=RUN`), reads these
drafts in one forward pass after the text; special tokens that only one of the two has, it never writes. Target and
draft of a place are sampled with the same noise (none if greedy):

    target = softmax(R l_D + (1 - R) l_AR)        R = `drafter_weight`, l_D of the model, l_AR of the verifier

The longest prefix of drafts that equal their targets is committed, and at least the first draft. So the text is written
from left to right, with several tokens per forward of the large model where both models agree. Example with two given
tokens and three places:

    text       p q M M M        the model: a matrix of ones     the verifier, of which p is cached:
    drafts         a b c                                            q  1 . .
    targets        a b x                                            a  1 1 .
    committed      a b                                              b  1 1 1

From the authors' code (github.com/danielmisrael/apd): target, prefix, first token, no mask after the last place ahead.
From a description of the paper, which we have not read: the same noise, R = 0.6, 200 places. (Their code takes the most
probable token of the target whatever the temperature; their demonstration has R = 0.7 and 100 places.) Left out: their
window of the model's own keys and values, which is an approximation; here every forward pass of the model runs over the
whole text, and only the verifier has a cache, which is exact. `forwards` counts those of the model, each of which comes
with one of the verifier. Our choices: drafts after the first EOS are not committed; mask and padding are never chosen.

Axes: B rows, C text length, N tokens to decode, K places ahead, V vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from refusion_jax.cli.settings import setting
from refusion_jax.decoding import cache as kv
from refusion_jax.decoding import settings as shared
from refusion_jax.decoding.auxiliary import in_vocabulary
from refusion_jax.decoding.decoder import Continuer, FilledText
from refusion_jax.decoding.reference import ReferenceDecoder
from refusion_jax.decoding.requests import Layout, Request, most_new_tokens, text_capacity
from refusion_jax.decoding.sampling import run_length, sample
from refusion_jax.decoding.trajectory import tell
from refusion_jax.model.interface import LanguageModel
from refusion_jax.model.shape import ModelConfig
from refusion_jax.systems import masked
from refusion_jax.systems.interface import System


@dataclasses.dataclass(frozen=True)
class CheckedSettings(shared.Settings):
    """How to decode a masked diffusion model with a verifier."""

    auxiliary_models = {"verifier": {"objective": "ar", "model.num_hidden_layers": 1}}

    verifier: str = setting(
        "", "Run of a left-to-right model with the same tokenizer, which verifies the drafts", scope="compiled"
    )
    drafter_weight: float = setting(
        0.6, "Weight of the drafting model's logits in the target; the verifier has the rest", at_least=0, at_most=1
    )
    lookahead: int = setting(200, "Positions drafted at once", scope="compiled", at_least=1, at_most=2**24)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftAndAgree(Continuer):
    """Commits drafts that the verifier agrees with; the cache is the verifier's, of all tokens but the last."""

    settings: ClassVar[type[CheckedSettings]] = CheckedSettings

    lookahead: int  # K
    shifted: bool

    @classmethod
    def for_requests(cls, requests: Sequence[Request], model: ModelConfig) -> Self:
        C, K = text_capacity(requests), min(requests[0].settings.lookahead, most_new_tokens(requests))
        return cls.sized(requests, model, width=C, lookahead=K, shifted=model.shifted, cache_length=C + K)

    def init(self, model: LanguageModel, layout: Layout, keys: Key[Array, "B"]) -> FilledText:
        cache, _ = kv.prefill_but_last(model.verifier, layout.given, self.chunk)
        return self.start_text(FilledText, layout, keys, self.lookahead, cache=cache)

    def scored(self, model: LanguageModel, rows: int) -> int:
        return super().scored(model, rows) * self.lookahead // self.width

    def step(self, model: LanguageModel, s: FilledText) -> FilledText:
        """One forward pass of the model over the text and the masks ahead, and one of the verifier over the drafts."""
        K, at = self.lookahead, s.next_places(self.lookahead)
        first, is_mask = at[:, :1], at < s.length[:, None]
        ahead = s.replace(text=s.text[:, : self.width], length=jnp.minimum(first[:, 0] + K, s.length))
        drafter = s.propose(masked.denoise(model, ahead, at, self.shifted), at, is_mask)
        drafts = drafter.token
        tell(drafts, at, is_mask)

        last = jnp.take_along_axis(s.text, first - 1, axis=1)
        fed = jnp.concatenate([last, drafts[:, :-1]], axis=1)
        logits, cache = kv.extend(model.verifier, s.cache, fed, at - 1)
        share = s.settings.drafter_weight[:, None, None]
        verifier = in_vocabulary(logits, model.verifier.config, drafter.real.shape[2])
        blended = jnp.where(drafter.real > -jnp.inf, share * drafter.real + (1 - share) * verifier, -jnp.inf)
        # With the noise of the drafts.
        targets = sample(s.choosable(blended, at), is_mask, s.forward_keys, at, s.settings)

        prefix = jnp.maximum(run_length(is_mask & (targets == drafts)), 1)[:, None]
        after = s.fill(cache, is_mask & (at < first + prefix), drafts, at)
        return after.replace(cache=kv.commit(cache, after.record.count - s.record.count))


def reference(model: LanguageModel, request: Request) -> dict:
    """The decoder in plain Python: one request, no cache, greedy."""
    plain, s = ReferenceDecoder(model, request, keeps_cache=False), request.settings
    check, shift = ReferenceDecoder(model.verifier, request), model.config.shifted
    while not plain.is_complete():
        text = list(plain.text.values())
        ahead = [place for place in plain.places if place not in plain.text][: s.lookahead]
        p = plain.denoise("draft", [*range(len(text) + len(ahead))])
        drafts = {place: plain.best(p[place - shift], place) for place in ahead}
        q = check.forward("check", text + list(drafts.values()))
        least = np.finfo(np.float32).tiny
        for place, draft in drafts.items():
            both = (x[: plain.ids.num_tokens] for x in (p[place - shift], q[place - 1]))
            log_p, log_q = (np.log(np.maximum(x, least)) for x in both)
            target = np.exp(s.drafter_weight * log_p + (1 - s.drafter_weight) * log_q)
            agrees = check.best(target / target.sum(), place) == draft
            if agrees or place == ahead[0]:
                plain.text[place] = draft
            if not agrees or draft == plain.ids.eos_id:
                break
    plain.margin = min(plain.margin, check.margin)
    return plain.result()


SYSTEM = System(
    name="apd",
    decoders={"apd": DraftAndAgree},
    references={"apd": reference},
    decodes=("llada", "dream", "r2ft"),
)
