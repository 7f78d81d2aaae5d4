"""The training objective of slot diffusion, a hybrid of next-token and masked-token cross-entropy.

Responses are cut into slots, some slots are masked, and the clean ones permuted. Slot size, mask ratio and permutation
are drawn per document (ReFusion, arXiv 2512.13586, section 3; where the paper and the authors' code differ, as in the
code). Everything is pure jnp with static shapes, run inside the jitted step on packed rows.

Example: a document of one prompt token `p` and six response tokens with slot size 2. Of its slots (ab)(cd)(ef) the
middle one is masked, and the clean ones come in the random order (ef)(ab):

    text         p  a  b  c  d  e  f
    inputs       p  e  f  a  b  M  M     prompt, clean slots in random order, masked slots in text order
    positions    0  5  6  1  2  3  4     every token keeps its position in the text
    labels       .  f  .  b  .  c  d     clean: the next token of the same slot; masked: the token itself

Axes: B rows, T row length.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32, Key, UInt32

from refusion_jax.batch.batch import Batch, count_documents, mean_over
from refusion_jax.batch.rows import Rows, document_start, next_in_row, per_document_sum, row_index, text_positions
from refusion_jax.batch.visibility import CAUSAL, Pattern, Visibility
from refusion_jax.cli.settings import setting
from refusion_jax.systems.interface import Objective


@struct.dataclass
class Noise:
    """The random draws of the corruption, one value for each token, equal over a document or a slot."""

    slot_size: Int32[Array, "B T"]  # per document
    mask_probability: Float32[Array, "B T"]  # per document
    is_masked: Bool[Array, "B T"]  # per slot
    rank: UInt32[Array, "B T"]  # per slot; orders the clean slots of a document


@dataclasses.dataclass(frozen=True)
class SlotDiffusion(Objective):
    """ReFusion's objective (arXiv 2512.13586, section 3.2)."""

    pattern: ClassVar[Pattern] = CAUSAL

    sizes: tuple[int, ...] = setting(
        (4, 8, 16, 32), "slot sizes, drawn uniformly per document", at_least=1, at_most=4096
    )
    eps: float = setting(1e-3, "least probability of masking a slot", above=0, below=1)
    mdm_weight: float = setting(
        1.0, "weight of the masked term, relative to the next-token term (lambda)", at_least=0, at_most=1e6
    )

    @property
    def coefficients(self) -> dict[str, float]:
        """Weights of `ar`, the next token inside clean slots, and `mdm`, the tokens of masked slots."""
        return {"ar": 1.0, "mdm": self.mdm_weight}

    def corrupt(self, rows: Rows, keys: Key[Array, "B"]) -> Batch:
        return hybrid_batch(rows, draw_noise(keys, rows, self.sizes, self.eps), self.mask_id)


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

    # One draw for every index of the row; a document or slot uses the draw at its first token.
    size, p, u, rank = jax.vmap(draw)(keys)
    size, p = (jnp.take_along_axis(x, document, axis=1) for x in (size, p))
    starts = slot_starts(rows, size)
    u, rank = (jnp.take_along_axis(x, starts, axis=1) for x in (u, rank))
    return Noise(size, p, rows.is_response & (u < p), rank)


def hybrid_batch(rows: Rows, noise: Noise, mask_id: int) -> Batch:
    """Masks and permutes each of N documents: prompt, clean slots by rank, masked slots in text order.

    Done by one stable sort by (document, class, rank) and gathers along it, so that no token is lost or duplicated.

    The weights are those of the hybrid loss. ar: the mean over all clean labels of the batch. mdm: 1/N * sum over
    masked tokens of CE / (p R), where p and R are the mask probability and the response length of the token's document.
    A term without labels is 0, never NaN.
    """
    starts = slot_starts(rows, noise.slot_size)
    same_slot_next = jnp.pad(starts[:, 1:] == starts[:, :-1], ((0, 0), (0, 1)))
    document = document_start(rows.segment_ids)
    kind = rows.is_response.astype(jnp.int32) + noise.is_masked  # 0 prompt or padding, 1 clean, 2 masked
    rank = jnp.where(kind == 1, noise.rank, 0)
    order = jnp.lexsort((rank, 3 * document + kind), axis=1)

    def permute(x):
        return jnp.take_along_axis(x, order, axis=1)

    # Documents stay in place, and so do the values of documents.
    documents = count_documents(rows.segment_ids)
    response_length = jnp.maximum(per_document_sum(rows.is_response, rows.segment_ids), 1)
    return Batch(
        inputs=permute(jnp.where(noise.is_masked, mask_id, rows.tokens)),
        positions=permute(text_positions(rows.segment_ids)),
        visibility=Visibility.of(CAUSAL, rows.segment_ids),
        labels=permute(jnp.where(noise.is_masked, rows.tokens, next_in_row(rows.tokens))),
        weights={
            "ar": mean_over(permute(rows.is_response & ~noise.is_masked & same_slot_next)),
            "mdm": permute(noise.is_masked) / (documents * noise.mask_probability * response_length),
        },
        diagnostics={"mask_ratio": noise.mask_probability, "slot_size": noise.slot_size},
    )
