"""The corruption of slot diffusion: cuts responses into slots, masks some of them, and permutes the clean ones.

Pure jnp with static shapes, run inside the jitted step on packed rows. Slot size, mask ratio and permutation are drawn
per document (ReFusion, arXiv 2512.13586, section 3; where the paper and the authors' code differ, as in the code).

Example: a document of one prompt token `p` and six response tokens with slot size 2. Of its slots (ab)(cd)(ef) the
middle one is masked, and the clean ones come in the random order (ef)(ab):

    text         p  a  b  c  d  e  f
    inputs       p  e  f  a  b  M  M     prompt, clean slots in random order, masked slots in text order
    positions    0  5  6  1  2  3  4     every token keeps its position in the text
    labels       .  f  .  b  .  c  d     clean: the next token of the same slot; masked: the token itself

Axes: B rows, T row length.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32, Key, UInt32

from refusion_jax.batch.rows import Rows, document_start, next_in_row, per_document_sum, row_index, text_positions


@struct.dataclass
class Noise:
    """The random draws of the corruption, one value for each token, equal over a document or a slot."""

    slot_size: Int32[Array, "B T"]  # per document
    mask_probability: Float32[Array, "B T"]  # per document
    is_masked: Bool[Array, "B T"]  # per slot
    rank: UInt32[Array, "B T"]  # per slot; orders the clean slots of a document


@struct.dataclass
class Corrupted:
    """Corrupted rows in physical order, ready for a causal model."""

    inputs: Int32[Array, "B T"]
    positions: Int32[Array, "B T"]  # in the text of the document
    segment_ids: Int32[Array, "B T"]
    labels: Int32[Array, "B T"]  # valid where clean_label or masked_label
    clean_label: Bool[Array, "B T"]  # a clean token that predicts the next one of its slot
    masked_label: Bool[Array, "B T"]  # a mask token that predicts its own
    slot_size: Int32[Array, "B T"]  # of the token's document
    mask_probability: Float32[Array, "B T"]  # of the token's document
    response_length: Int32[Array, "B T"]  # of the token's document


def slot_starts(rows: Rows, slot_size: Int32[Array, "B T"]) -> Int32[Array, "B T"]:
    """Index in the row where each token's slot begins; prompt and padding tokens are slots of one token."""
    index = row_index(rows.tokens)
    offset = text_positions(rows.segment_ids * 2 + rows.is_response)  # place in the prompt or in the response
    return jnp.where(rows.is_response, index - offset % slot_size, index)


def draw_noise(keys: Key[Array, "B"], rows: Rows, sizes: tuple[int, ...], eps: float) -> Noise:
    """Draws slot size, mask ratio, masked slots and the order of the clean ones, from a key per row.

    k ~ U(sizes) and t ~ U(0, 1) per document, p = (1 - eps) t + eps; each slot is masked with probability p; clean
    slots come in a uniformly random order (ReFusion, section 3.2).
    """
    T = rows.tokens.shape[-1]
    document = document_start(rows.segment_ids)

    def draw(key):
        size_key, t_key, mask_key, rank_key = jax.random.split(key, 4)
        return (
            jax.random.choice(size_key, jnp.asarray(sizes, jnp.int32), (T,)),
            (1 - eps) * jax.random.uniform(t_key, (T,)) + eps,
            jax.random.uniform(mask_key, (T,)),
            jax.random.bits(rank_key, (T,)),
        )

    # One draw for every index of the row; a document or slot uses that at its first token.
    size, p, u, rank = jax.vmap(draw)(keys)
    size, p = (jnp.take_along_axis(x, document, axis=1) for x in (size, p))
    starts = slot_starts(rows, size)
    u, rank = (jnp.take_along_axis(x, starts, axis=1) for x in (u, rank))
    return Noise(size, p, rows.is_response & (u < p), rank)


def corrupt(rows: Rows, noise: Noise, mask_id: int) -> Corrupted:
    """Masks and permutes each document: prompt, clean slots by rank, masked slots in text order.

    Done by one stable sort by (document, class, rank) and gathers along it, so that no token is lost or duplicated.
    """
    index = row_index(rows.tokens)
    positions = text_positions(rows.segment_ids)
    starts = slot_starts(rows, noise.slot_size)
    same_slot_next = jnp.pad(starts[:, 1:] == starts[:, :-1], ((0, 0), (0, 1)))
    next_token = next_in_row(rows.tokens)

    document = document_start(rows.segment_ids)
    kind = rows.is_response.astype(jnp.int32) + noise.is_masked  # 0 prompt or padding, 1 clean, 2 masked
    rank = jnp.where(kind == 1, noise.rank, 0)
    *_, order = jax.lax.sort((3 * document + kind, rank, index), dimension=1, num_keys=2, is_stable=True)

    def permute(x):
        return jnp.take_along_axis(x, order, axis=1)

    return Corrupted(
        inputs=permute(jnp.where(noise.is_masked, mask_id, rows.tokens)),
        positions=permute(positions),
        segment_ids=rows.segment_ids,  # documents stay in place, and so do per-document values
        labels=permute(jnp.where(noise.is_masked, rows.tokens, next_token)),
        clean_label=permute(rows.is_response & ~noise.is_masked & same_slot_next),
        masked_label=permute(noise.is_masked),
        slot_size=noise.slot_size,
        mask_probability=noise.mask_probability,
        response_length=per_document_sum(rows.is_response, rows.segment_ids),
    )
