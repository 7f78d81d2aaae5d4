"""Convolutional decoding (Seo et al., arXiv 2509.15188): prefers masks near known tokens, without blocks.

Decoding: every forward pass runs over the whole text. The confidence of a mask is the probability of its token times
tanh(r), where r counts the given and committed tokens within (k - 1) / 2 places; a step commits the n most
confident masks. With k = 5 (an even k counts as k + 1), in a text of two given tokens:

    text       p q M M c M          the mask is a matrix of ones:
    r              3 2   1          every token sees its whole document, as the model was trained

From the paper and the authors' code: tanh, window, c = 1, k = 512, the number of commits of a step (masks over steps,
one more in the first steps). The paper's common factor on all confidences of a step does not change their order and is
left out. Our choices: a row ends once all places up to an EOS are committed; mask and padding are never chosen. Short
answers need a smaller window than 512, as one that holds the whole text does not change the order either.

Axes: B rows, C text length, N tokens to decode, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from refusion_jax.batch.rows import row_index
from refusion_jax.cli.settings import setting
from refusion_jax.decoding import settings as shared
from refusion_jax.decoding.reference import ReferenceDecoder
from refusion_jax.decoding.requests import Request
from refusion_jax.decoding.sampling import put
from refusion_jax.model.interface import LanguageModel
from refusion_jax.systems import masked
from refusion_jax.systems.interface import System


@dataclasses.dataclass(frozen=True)
class ConvSettings(shared.Settings):
    """How to decode a masked diffusion model with a preference for masks near known tokens."""

    steps: int = setting(0, "Passes for an answer of max_new_tokens; 0: one per token", at_least=0, at_most=2**24)
    conv_window: int = setting(
        512, "Positions around a mask in which known tokens raise its confidence", at_least=1, at_most=2**24
    )

    @classmethod
    def operating_points(cls, new_tokens: int, trained: Mapping[str, Any]) -> list[dict[str, Any]]:
        points = ((1, 8), (1, 4), (1, 2), (2, 4), (4, 4), (8, 4))  # tokens per forward, windows in an answer
        return [{"steps": max(1, new_tokens // n), "conv_window": max(1, new_tokens // parts)} for n, parts in points]


class Convolve(masked.OnSchedule):
    """Commits masks near known tokens first."""

    settings: ClassVar[type[ConvSettings]] = ConvSettings

    def confidence_of(self, s: masked.MaskedText, w: masked.Window, proposal: masked.Proposal) -> Float32[Array, "B N"]:
        # All of the text except what is left to decode: given text may hold mask tokens, too.
        into = jnp.where(w.masked, w.position, s.text.shape[1])
        is_left = put(jnp.zeros_like(s.text), into, jnp.ones_like(into)) > 0
        is_known = (row_index(s.text) < s.length[:, None]) & ~is_left
        known = known_nearby(is_known, w.position, s.settings.conv_window // 2)
        return proposal.probability * jnp.tanh(known.astype(jnp.float32))


def known_nearby(
    is_known: Bool[Array, "B C"], position: Int32[Array, "B N"], reach: Int32[Array, "B"]
) -> Int32[Array, "B N"]:
    """Number of known tokens at most `reach` places from each position."""
    C = is_known.shape[1]
    up_to = jnp.pad(jnp.cumsum(is_known, axis=1), ((0, 0), (1, 0)))  # [B, C + 1], known before each index
    ends = jnp.minimum(position + reach[:, None] + 1, C), jnp.maximum(position - reach[:, None], 0)
    after, before = (jnp.take_along_axis(up_to, end, axis=1) for end in ends)
    return after - before


def reference(model: LanguageModel, request: Request) -> dict:
    """The decoder in plain Python: one request, greedy."""
    plain, s = ReferenceDecoder(model, request, keeps_cache=False), request.settings

    def confidence(p, place):
        near = sum(abs(place - at) <= s.conv_window // 2 for at in plain.text)
        return float(p[plain.best(p, place)]) * math.tanh(near)

    masked.fill(plain, Convolve.counts(request), confidence, plain.places, shift=model.config.shifted)
    return plain.result()


SYSTEM = System(
    name="conv",
    decoders={"conv": Convolve},
    references={"conv": reference},
    decodes=("llada", "dream", "r2ft"),
)
