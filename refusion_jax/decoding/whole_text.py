"""Forwards over whole texts without a cache: each runs in the smallest compiled width that holds the texts at hand.

Shapes are static, so a few widths are compiled, and every forward chooses among them by its longest active row. A short
text that is decoded alone takes no longer because other texts of the queue are long.

Axes: B rows, C text length, K places of a window, D hidden size, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from refusion_jax.batch.visibility import BIDIRECTIONAL, Visibility
from refusion_jax.decoding.masked_text import MaskedText
from refusion_jax.model.transformer import Transformer

_WIDTHS = 4  # number of compiled widths, at most


def widths(capacity: int, least: int = 0) -> list[int]:
    """The widths that are compiled: C / 4, C / 2, 3 C / 4 and C, in ascending order.

    Args:
      capacity: C.
      least: what is narrower is made as wide. No text is shorter than its answer, N, so whole texts need no less.
    """
    return sorted({max(least, -(-capacity * i // _WIDTHS)) for i in range(1, _WIDTHS + 1)})


def smallest(count: Int32[Array, "B"], of: list[int]) -> Int32[Array, ""]:
    """The index of the smallest of these widths that holds the tokens of every row, of which there are `count`."""
    return jnp.argmax(jnp.max(count) <= jnp.array(of)).astype(jnp.int32)


def in_smallest(count: Int32[Array, "B"], of: list[int], forward: Callable[[int], Any]) -> Any:
    """Runs a function of the width, with the smallest of these widths that holds the tokens of every row."""
    return jax.lax.switch(smallest(count, of), [functools.partial(forward, width) for width in of])


def live_lengths(s: MaskedText) -> Int32[Array, "B"]:
    """The length of each row's text; 0 for rows that are finished."""
    return jnp.where(s.active, s.length, 0)


def denoise(model: Transformer, s: MaskedText, position: Int32[Array, "B K"], shifted: bool) -> Float32[Array, "B K V"]:
    """One forward over the whole text: logits at some positions.

    Args:
      model: the transformer.
      s: holds the texts.
      position: in the text, for which logits are wanted; those of finished rows mean nothing.
      shifted: whether the token at j is read from the logits at j - 1.
    """
    at = jnp.maximum(position - shifted, 0)  # place 0 is never decoded then: see `masked_text.check_first`

    def forward(width: int):
        index = jnp.broadcast_to(jnp.arange(width)[None], (len(at), width))
        seen = Visibility.of(BIDIRECTIONAL, (index < s.length[:, None]).astype(jnp.int32))
        hidden = model.hidden(s.text[:, :width], index, seen)
        return jnp.take_along_axis(hidden, jnp.minimum(at, width - 1)[:, :, None], axis=1)

    C, N = s.text.shape[1], s.layout.places.position.shape[1]
    return model.logits(in_smallest(live_lengths(s), widths(C, N), forward))
