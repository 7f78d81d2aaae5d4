"""Token merging for masked text: of the masks behind the current block, only one in every `merge` is fed.

In the spirit of ToMA (arXiv 2509.10918), which merges similar tokens of an image and keeps representatives that are
near to all others. Masks differ in their position alone, so the representatives are evenly spaced: of every `merge`
masks behind the block, counted from its end, the middle one is fed at its own position and the others are left out.
Nothing has to be unmerged, since no token is read from masks behind the block. Example with a block of two behind three
given tokens and merge = 3 (the last group may be smaller):

    text       p q r M M | M M M M M        fed        p q r M M   M     M

This is an approximation: a merged group is one key in attention instead of three. Each forward runs in the smallest
compiled width that holds the fed tokens of every row.

Axes: B rows, C text length, K places of a window, D hidden size.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from refusion_jax.batch.visibility import BIDIRECTIONAL, Visibility
from refusion_jax.decoding.masked_text import MaskedText, put
from refusion_jax.decoding.whole_text import in_smallest, widths
from refusion_jax.model.transformer import Transformer


def fed_places(s: MaskedText, behind: Int32[Array, "B"], merge: int) -> Bool[Array, "B C"]:
    """Which places of the text are fed; none in finished rows.

    Args:
      s: holds the texts.
      behind: number of the first place to decode behind the block.
      merge: size of the groups of masks behind the block.
    """
    places, text = s.layout.places, jnp.arange(s.text.shape[1])[None]
    number = jnp.arange(places.position.shape[1])[None] - behind[:, None]  # [B, N], counted from behind the block
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
    """One forward over the fed places: logits at some of them.

    Args:
      model: the transformer.
      s: holds the texts.
      position: fed places for which logits are wanted.
      is_fed: from `fed_places`.
    """
    C = s.text.shape[1]
    count = jnp.sum(is_fed, axis=1)
    order = jnp.argsort(~is_fed, axis=1, stable=True)  # fed places first, in text order
    at = jnp.take_along_axis(jnp.cumsum(is_fed, axis=1) - is_fed, position, axis=1)  # [B, K], as fed

    def forward(width: int):
        fed = order[:, :width]
        tokens = jnp.take_along_axis(s.text, fed, axis=1)
        is_token = (jnp.arange(width)[None] < count[:, None]).astype(jnp.int32)
        hidden = model.hidden(tokens, fed, Visibility.of(BIDIRECTIONAL, is_token))
        return jnp.take_along_axis(hidden, jnp.minimum(at, width - 1)[:, :, None], axis=1)

    return model.logits(in_smallest(count, widths(C), forward))
