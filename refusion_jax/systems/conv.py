"""Convolutional decoding (Seo et al., arXiv 2509.15188): prefers masks near known tokens, without blocks.

Decoding: every forward runs over the whole text. The confidence of a mask is the probability of its token times
tanh(c * r), where r counts the given and committed tokens within (k - 1) / 2 places; a step commits the n most
confident masks. With k = 5 (an even k counts as k + 1), in a text of two given tokens:

    text       p q M M c M          the mask is a matrix of ones:
    r              3 2   1          every token sees its whole document, as the model was trained

It decodes models that other systems train. `shift` tells whether these read the token at j from the logits at j - 1;
our checkpoints store that.

From the paper and the authors' code: tanh, window, c = 1, k = 512, the number of commits of a step (masks over steps,
one more in the first steps). The paper's common factor on all confidences of a step does not change their order and is
left out. Our choices: a row ends once all places up to an EOS are committed; mask and padding are never chosen. Short
answers need a smaller window than 512, as one that holds the whole text does not change the order either.

Axes: B rows, C text length, N tokens to decode, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float32, Int32, Key

from refusion_jax.cli.settings import setting
from refusion_jax.decoding import masked_text
from refusion_jax.decoding import settings as shared
from refusion_jax.decoding.masked_text import MaskedText
from refusion_jax.decoding.plain import Plain
from refusion_jax.decoding.requests import Layout, Request, most_new_tokens, text_capacity
from refusion_jax.decoding.sampling import probability
from refusion_jax.decoding.whole_text import denoise
from refusion_jax.model.transformer import ModelConfig, Transformer
from refusion_jax.systems.interface import System


@dataclasses.dataclass(frozen=True)
class ConvSettings(shared.Settings):
    """How to decode a masked diffusion model with a preference for masks near known tokens."""

    steps: int = setting(0, "Forwards for an answer of max_new_tokens; 0: one a token", at_least=0, at_most=2**24)
    conv_window: int = setting(
        512, "Places around a mask in which known tokens raise its confidence", at_least=1, at_most=2**24
    )
    conv_scale: float = setting(1.0, "c: how fast confidence saturates with known tokens nearby", above=0, at_most=1e4)
    shift: str = setting(*masked_text.SHIFT, scope="compiled", choices=("auto", "yes", "no"))

    @classmethod
    def operating_points(cls, new_tokens: int, trained: Mapping[str, Any]) -> list[dict[str, Any]]:
        points = ((1, 8), (1, 4), (1, 2), (2, 4), (4, 4), (8, 4))  # tokens a forward, windows in an answer
        return [{"steps": max(1, new_tokens // n), "conv_window": max(1, new_tokens // parts)} for n, parts in points]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSettings(shared.RowSettings):
    """The traced settings of each row."""

    steps: Int32[ArrayLike, "*B"]
    conv_window: Int32[ArrayLike, "*B"]
    conv_scale: Float32[ArrayLike, "*B"]


@dataclasses.dataclass(frozen=True)
class Convolve:
    """The decoder with its compiled sizes."""

    settings: ClassVar[type[ConvSettings]] = ConvSettings
    cache_length: ClassVar[int] = 0

    ids: shared.TokenIds
    width: int  # C, tokens of the longest text
    new_tokens: int  # N, at most, in a row
    shifted: bool

    @classmethod
    def for_requests(cls, requests: Sequence[Request], model: ModelConfig) -> Self:
        """The smallest sizes that serve all of these requests.

        Raises:
          UserError: where a request begins with a gap, and the model cannot write a first token.
        """
        shifted = masked_text.is_shifted(requests[0].settings.shift, model)
        if shifted:
            masked_text.check_first(requests)
        ids = shared.TokenIds.of(requests[0].settings, model)
        return cls(ids, text_capacity(requests), most_new_tokens(requests), shifted)

    def lay_out(self, requests: Sequence[Request]) -> Layout:
        """Given tokens, places to decode and settings of some requests."""
        return Layout.of(requests, self.width, self.new_tokens, RowSettings)

    def init(self, _: Transformer, layout: Layout, keys: Key[Array, "B"]) -> MaskedText:
        """The initial state; there is no prefill."""
        return MaskedText.start(layout, keys, self.ids, self.new_tokens)

    def step(self, model: Transformer, s: MaskedText) -> MaskedText:
        """One forward over the whole text, which commits the most confident masks."""
        own, size = s.layout.settings, s.layout.places.count
        w = masked_text.window(s, self.ids, self.new_tokens, jnp.zeros_like(size), size)
        logits = denoise(model, s, w.position, self.shifted)
        chosen, real, _ = masked_text.propose(logits, s, w, self.ids)
        known = known_nearby(s.text != self.ids.mask_id, w.position, own.conv_window // 2)
        confidence = probability(real, chosen) * jnp.tanh(own.conv_scale[:, None] * known)
        steps = jnp.clip(jnp.where(own.steps > 0, own.steps, size), 1, jnp.maximum(size, 1))
        share = masked_text.even_share(size, steps, s.forwards)
        return masked_text.commit(s, w, chosen, masked_text.ranks(confidence, w) < share[:, None], self.ids)


def known_nearby(
    is_known: Bool[Array, "B C"], position: Int32[Array, "B N"], reach: Int32[Array, "B"]
) -> Int32[Array, "B N"]:
    """Number of known tokens at most `reach` places from each position."""
    C = is_known.shape[1]
    up_to = jnp.pad(jnp.cumsum(is_known, axis=1), ((0, 0), (1, 0)))  # [B, C + 1], known before each index
    ends = jnp.minimum(position + reach[:, None] + 1, C), jnp.maximum(position - reach[:, None], 0)
    after, before = (jnp.take_along_axis(up_to, end, axis=1) for end in ends)
    return after - before


def reference(model: Transformer, request: Request) -> dict:
    """The decoder in plain Python: one request, greedy."""
    plain, s, commits = Plain(model, request, keeps_cache=False), request.settings, []
    shift, n = masked_text.is_shifted(s.shift, model.config), len(plain.places)
    text, steps = dict(plain.given), min(s.steps or n, n)
    for step in range(steps):
        tokens = [text.get(place, plain.ids.mask_id) for place in range(request.length)]
        p = plain.forward("denoise", tokens, [*range(len(tokens))], np.ones((len(tokens), len(tokens)), bool))
        best = {place: plain.best(p[place - shift], place) for place in plain.places if place not in text}
        near = {place: sum(abs(place - at) <= s.conv_window // 2 for at in text) for place in best}
        scores = {at: float(p[at - shift][best[at]]) * math.tanh(s.conv_scale * near[at]) for at in best}
        for place in plain.first(scores, n // steps + (step < n % steps)):
            text[place] = best[place]
            commits.append((best[place], place))
        if plain.is_settled(text):
            break
    return plain.result(commits, len(plain.phases))


SYSTEM = System(
    name="conv",
    objective=None,
    decoders={"conv": Convolve},
    references={"conv": reference},
    decodes=("llada", "dream", "r2ft"),
)
