"""Prompt look-up (n-gram speculation): a left-to-right model whose drafts are copied from the text so far.

The last tokens of the text are looked up in all of it, prompt and answer. What followed their longest earlier match, of
at most `ngram` tokens and the latest of equally long ones, is the draft of what follows now. A draft that runs into the
end of the text goes on with its own tokens. One forward pass verifies all drafts by the rule of speculative
sampling: greedy, the text is that of `ar`, token by token; with a temperature it has the same distribution. Example
with a prompt `p a b c a b x`, after which `a b` was written, and three drafts:

    text        p a b c a b x a b       two tokens, `a b`, stood before at 1 and at 4, the latest
    drafts                        x a b
    fed                         b x a b     and the model's own next tokens are    x a c
    committed                     x a c

From the idea's code (github.com/apoorvumang/prompt-lookup-decoding) and vLLM's documentation of `ngram`: longer matches
first, down to one token. Our choices: of equally long matches the latest, and drafts that repeat themselves.

Axes: B rows, C cache entries, N tokens per forward at most, M = N - 1 drafts.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int32, Key

from refusion_jax.cli.settings import setting
from refusion_jax.decoding import cache as kv
from refusion_jax.decoding import settings as shared
from refusion_jax.decoding.decoder import Continuation
from refusion_jax.decoding.reference import ReferenceDecoder
from refusion_jax.decoding.requests import Layout, Request
from refusion_jax.decoding.sampling import entry, put
from refusion_jax.model.interface import LanguageModel
from refusion_jax.systems import ar
from refusion_jax.systems.interface import System


@dataclasses.dataclass(frozen=True)
class LookupSettings(shared.Settings):
    """How to decode a left-to-right model with drafts from the text."""

    draft_length: int = setting(7, "Tokens drafted at once", scope="compiled", at_least=1, at_most=4096)
    ngram: int = setting(3, "Last tokens to look up, at most", scope="compiled", at_least=1, at_most=64)
    points = [{"draft_length": drafts} for drafts in (3, 7)]


@struct.dataclass
class LookUpState(Continuation):
    """A cached text, as tokens to look up."""

    text: Int32[Array, "B C"]  # given and committed tokens; the last one is not in the cache yet


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookUp(ar.Speculative):
    """Verifies drafts copied from the text."""

    settings: ClassVar[type[LookupSettings]] = LookupSettings

    ngram: int

    def init(self, model: LanguageModel, layout: Layout, keys: Key[Array, "B"]) -> LookUpState:
        cache, _ = kv.prefill_but_last(model, layout.given, self.chunk)
        return self.start(LookUpState, layout, keys, cache=cache, text=layout.given.tokens)

    def step(self, model: LanguageModel, s: LookUpState) -> LookUpState:
        """One forward pass, in which each row commits the accepted drafts and one more token."""
        N, places = self.width, s.next_places(self.width)
        drafts, drafted = look_up(s.text, places[:, 0], N - 1, self.ngram)
        last = entry(s.text, places[:, 0] - 1)
        q = jax.nn.one_hot(drafts, model.config.vocab_size)
        after, tokens, kept = self.verify(model, s, last, drafts, drafted, q)
        into = jnp.where(jnp.arange(N)[None] < kept[:, None], places, s.text.shape[1])
        return after.replace(text=put(s.text, into, tokens))


def look_up(
    text: Int32[Array, "B C"], length: Int32[Array, "B"], count: int, ngram: int
) -> tuple[Int32[Array, "B M"], Int32[Array, "B"]]:
    """M drafts of the tokens after a text, and how many of them count: all, or none if its last token is new in it.

    The text is the first `length` tokens, at least one. At most the last `ngram` tokens are compared.
    """
    index, last = jnp.arange(text.shape[1])[None], length[:, None] - 1
    same, equal = jnp.zeros_like(text), index < last  # number of tokens up to each index that equal the last ones
    for back in range(ngram):
        end = jnp.take_along_axis(text, jnp.maximum(last - back, 0), axis=1)
        equal &= (jnp.roll(text, back, axis=1) == end) & (index >= back)
        same += equal
    at = jnp.argmax(same * text.shape[1] + index * (same > 0), axis=1)[:, None]  # the longest match, then the latest
    ahead = 1 + jnp.arange(count)[None] % jnp.maximum(last - at, 1)
    drafts = jnp.take_along_axis(text, jnp.minimum(at + ahead, last), axis=1)
    return drafts, jnp.where(jnp.max(same, axis=1) > 0, count, 0)


def reference(model: LanguageModel, request: Request) -> dict:
    """The decoder in plain Python: one request, no cache, greedy."""
    plain, s = ReferenceDecoder(model, request), request.settings
    while not plain.is_complete():
        text, drafts = list(plain.text.values()), []
        for n in range(1, s.ngram + 1):
            before = [at for at in range(n, len(text)) if text[at - n : at] == text[-n:]]
            if before:
                drafts = [text[before[-1] + i % (len(text) - before[-1])] for i in range(s.draft_length)]
        plain.commit_verified(drafts, plain.next_tokens(plain.forward("next", text + drafts)))
    return plain.result()


SYSTEM = System(
    name="prompt_lookup",
    decoders={"prompt_lookup": LookUp},
    references={"prompt_lookup": reference},
    scoring=ar.SCORING,
    decodes=("ar",),
)
