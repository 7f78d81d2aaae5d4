"""Dense slot diffusion: each response token is trained on twice, as the next token of a clean text in which nothing is
masked and, if there is a copy of its slot, as the token of a mask.

A row of T places becomes [T clean; M copies]. The clean half is the row itself, with the responses cut into slots, and
the slots of each document reordered: with probability `text_order` they stay in text order, otherwise the order is
random. In text order the first slot is cut short by a random phase, so that slots begin anywhere. A copy of a slot
consists of masks at its positions, which see what precedes the slot in the clean half, and its masks up to themselves.

    clean token at index c:                         rank (c + 1) S, group 0         S: above any slot size
    mask o of a slot whose first token has index b: rank b S + o,   group b + 1

Example: a prompt token `p` and the slots (ab)(cd) in the order (cd)(ab) (row: query; capitals: masks at those places):

                     p c d a b A B C D
    inputs    p      1 . . . . . . . .
              c      1 1 . . . . . . .
              d      1 1 1 . . . . . .
              a      1 1 1 1 . . . . .
              b      1 1 1 1 1 . . . .
              A      1 1 1 . . 1 . . .
              B      1 1 1 . . 1 1 . .
              C      1 . . . . . . 1 .
              D      1 . . . . . . 1 1
    labels    a d . b . a b c d

A clean token predicts the next token of the text, unless that comes earlier in the order and is visible: `b` has no
label, as it sees `c`. Both terms are means over their labels.

Axes: B rows, T row length, M copies per row.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int32, Key, UInt32

from refusion_jax.batch.batch import Batch, mean_over
from refusion_jax.batch.rows import Rows, document_start, next_in_row, precedes_response, row_index, text_positions
from refusion_jax.batch.visibility import Pattern, Visibility
from refusion_jax.cli.settings import setting
from refusion_jax.systems.interface import Objective


@dataclasses.dataclass(frozen=True)
class Copied(Pattern):
    """[T clean; M copies], with M = ceil(share T) masks, evenly spaced over the row, each of which is a slot."""

    share: float

    def rank_and_group(self, length: int) -> tuple[Int32[np.ndarray, "T"], Int32[np.ndarray, "T"]]:
        T = int(length / (1 + self.share) + 1e-6)
        index, copied = np.arange(T, dtype=np.int32), np.linspace(0, T, length - T, endpoint=False).astype(np.int32)
        return np.concatenate([2 * index + 2, 2 * copied]), np.concatenate([0 * index, copied + 1])


@struct.dataclass
class Noise:
    """The random draws, one value for each token, equal over a document or a slot."""

    slot_size: Int32[Array, "B T"]  # per document
    start: Int32[Array, "B T"]  # index in the row where the token's slot begins; prompt tokens are their own slots
    rank: UInt32[Array, "B T"]  # per slot; orders the slots of a document
    priority: UInt32[Array, "B T"]  # per slot; the slots with the lowest ones are copied


@dataclasses.dataclass(frozen=True)
class DenseSlots(Objective):
    """Mean CE of next tokens in the clean half + mdm_weight * mean CE of the tokens of masks."""

    sizes: tuple[int, ...] = setting((4, 8), "slot sizes, drawn uniformly per document", at_least=1, at_most=1024)
    text_order: float = setting(
        0.5, "probability that the slots of a document are in text order rather than in random order",
        at_least=0, at_most=1,
    )  # fmt: skip
    copies: float = setting(
        0.5, "masks per row, as a share of row_length; a row with more response tokens leaves out slots at random",
        above=0, at_most=1,
    )  # fmt: skip
    mdm_weight: float = setting(
        1.0, "weight of the masked term, relative to the next-token term", at_least=0, at_most=1e6
    )

    @property
    def coefficients(self) -> dict[str, float]:
        return {"ar": 1.0, "mdm": self.mdm_weight}

    @property
    def pattern(self) -> Pattern:
        """Of slots of one token; whatever the slots, a mask sees as many keys as the clean token at its place."""
        return Copied(self.copies)

    def input_length(self, row_length: int) -> int:
        return row_length + math.ceil(self.copies * row_length)

    def corrupt(self, rows: Rows, keys: Key[Array, "B"]) -> Batch:
        copies = self.input_length(rows.tokens.shape[1]) - rows.tokens.shape[1]
        noise = draw_noise(keys, rows, self.sizes, self.text_order)
        return dense_batch(rows, noise, copies, max(self.sizes) + 1, self.mask_id)


def draw_noise(keys: Key[Array, "B"], rows: Rows, sizes: tuple[int, ...], text_order: float) -> Noise:
    """Draws slot size, order and phase of each document, and which slots are copied, from a key per row."""
    T = rows.tokens.shape[1]

    def draw(key):
        size_key, order_key, phase_key, rank_key, copy_key = jax.random.split(key, 5)
        return (
            jax.random.choice(size_key, jnp.asarray(sizes, jnp.int32), (T,)),
            jax.random.uniform(order_key, (T,)) < text_order,
            jax.random.bits(phase_key, (T,)),
            jax.random.bits(rank_key, (T,)),
            jax.random.bits(copy_key, (T,)),
        )

    # One draw for every index of the row; a document or slot uses the draw at its first token.
    size, in_text_order, phase, rank, priority = jax.vmap(draw)(keys)
    document, index = document_start(rows.segment_ids), row_index(rows.tokens)
    size, in_text_order, phase = (jnp.take_along_axis(x, document, axis=1) for x in (size, in_text_order, phase))
    missing = jnp.where(in_text_order, (phase % size.astype(jnp.uint32)).astype(jnp.int32), 0)  # of the first slot
    offset = text_positions(rows.segment_ids * 2 + rows.is_response)  # in the response
    start = jnp.where(rows.is_response, index - jnp.minimum(offset, (offset + missing) % size), index)
    rank, priority = (jnp.take_along_axis(x, start, axis=1) for x in (rank, priority))
    return Noise(size, start, jnp.where(in_text_order, start.astype(jnp.uint32), rank), priority)


def dense_batch(rows: Rows, noise: Noise, copies: int, stride: int, mask_id: int) -> Batch:
    """Orders the slots and appends their copies; `copies` is M, and `stride` S, above any slot size."""
    index, positions = row_index(rows.tokens), text_positions(rows.segment_ids)
    part = 2 * document_start(rows.segment_ids) + rows.is_response  # prompts before responses, documents in place
    order = jnp.lexsort((jnp.where(rows.is_response, noise.rank, 0), part), axis=1)  # [B, T] the token at each place
    place = jnp.argsort(order, axis=1)  # of each token

    # As many whole slots as fit, then the part of the next one that fits.
    chosen = jnp.lexsort((noise.priority, ~rows.is_response), axis=1)[:, :copies]
    copied = jnp.sort(jnp.where(jnp.take_along_axis(rows.is_response, chosen, axis=1), chosen, index.shape[1]), axis=1)
    is_copy = copied < index.shape[1]
    copied = jnp.minimum(copied, index.shape[1] - 1)
    before = jnp.take_along_axis(place, noise.start, axis=1)  # b, of the token's slot

    has_next = precedes_response(rows) & ((next_in_row(noise.start) == noise.start) | (next_in_row(place) > place))
    none = jnp.zeros(has_next.shape)

    def arranged(clean, copy):
        """[B, T + M] from values of tokens in text order, one for the clean half and one for the copies."""
        return jnp.concatenate([jnp.take_along_axis(clean, order, 1), jnp.take_along_axis(copy, copied, 1)], axis=1)

    def only_copies(x, otherwise):
        return x.at[:, index.shape[1] :].set(jnp.where(is_copy, x[:, index.shape[1] :], otherwise))

    return Batch(
        inputs=arranged(rows.tokens, jnp.full_like(rows.tokens, mask_id)),
        positions=arranged(positions, positions),
        visibility=Visibility(
            only_copies(arranged(rows.segment_ids, rows.segment_ids), 0),
            arranged((place + 1) * stride, before * stride + index - noise.start),
            arranged(jnp.zeros_like(index), before + 1),
        ),
        labels=arranged(next_in_row(rows.tokens), rows.tokens),
        weights={
            "ar": mean_over(arranged(has_next, none > 0)),
            "mdm": mean_over(only_copies(arranged(none > 0, none == 0), False)),
        },
        diagnostics={"slot_size": arranged(noise.slot_size, noise.slot_size)},
    )
