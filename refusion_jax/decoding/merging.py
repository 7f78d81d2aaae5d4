"""Token merging for masked text: of the masks behind the block that is decoded, one stands for several.

After ToMA (arXiv 2509.10918), which merges the tokens of an image that are most alike, and chooses those that stand for
the others so that all are near to one. Masks are all alike but for where they stand, so those that stand for the others
lie at equal distances: of every `merge` masks behind the block, counted from its end, the middle one is fed, at its own
place, and the others are left out. Nothing is unmerged, as nothing is read from masks behind the block. A block of two
behind three given tokens, merge = 3 (a group at the end of the answer may be smaller):

    text       p q r M M | M M M M M        fed        p q r M M   M     M

An approximation: a mask that stands for three is one key in attention, not three. Shapes are static, so a forward runs
in the least of some widths that holds what is fed in every row.

Axes: B rows, C text length, K places looked at, D hidden size.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from refusion_jax.batch.visibility import BIDIRECTIONAL, Visibility
from refusion_jax.decoding.masked_text import MaskedText, put
from refusion_jax.model.transformer import Transformer

_WIDTHS = 4  # forwards of so many widths are compiled, from C / 4 to C


def fed_places(s: MaskedText, behind: Int32[Array, "B"], merge: int) -> Bool[Array, "B C"]:
    """The places of the text that are fed; none in rows that are done.

    Args:
      s: the texts.
      behind: the first of the places to decode, by number, that lies behind the block.
      merge: masks behind the block that one stands for.
    """
    places, text = s.layout.places, jnp.arange(s.text.shape[1])[None]
    number = jnp.arange(places.position.shape[1])[None] - behind[:, None]  # [B, N], from 0 behind the block
    left = places.count[:, None] - behind[:, None]
    group = number - number % merge
    middle = (jnp.minimum(merge, left - group) - 1) // 2
    is_left_out = (number >= 0) & (number < left) & (number - group != middle)
    into = jnp.where(is_left_out, places.position, s.text.shape[1])
    kept = put(jnp.ones(s.text.shape, jnp.int32), into, jnp.zeros_like(into)) > 0
    return kept & (text < s.length[:, None]) & s.active[:, None]


def merged_logits(
    model: Transformer, s: MaskedText, position: Int32[Array, "B K"], is_fed: Bool[Array, "B C"]
) -> Float32[Array, "B K V"]:
    """One forward over what is fed: logits of the tokens at some positions, which are fed.

    Args:
      model: the transformer.
      s: the texts.
      position: in the text.
      is_fed: from `fed_places`.
    """
    C = s.text.shape[1]
    count = jnp.sum(is_fed, axis=1)
    order = jnp.argsort(~is_fed, axis=1, stable=True)  # places that are fed first, in text order
    at = jnp.take_along_axis(jnp.cumsum(is_fed, axis=1) - is_fed, position, axis=1)  # [B, K], where they are fed

    def in_width(width: int):
        def run():
            fed = order[:, :width]
            tokens = jnp.take_along_axis(s.text, fed, axis=1)
            is_token = (jnp.arange(width)[None] < count[:, None]).astype(jnp.int32)
            hidden = model.hidden(tokens, fed, Visibility.of(BIDIRECTIONAL, is_token))
            return jnp.take_along_axis(hidden, jnp.minimum(at, width - 1)[:, :, None], axis=1)

        return run

    widths = sorted({-(-C * i // _WIDTHS) for i in range(1, _WIDTHS + 1)})
    holds = jnp.array([jnp.max(count) <= width for width in widths])
    return model.logits(jax.lax.switch(jnp.argmax(holds), [in_width(width) for width in widths]))
