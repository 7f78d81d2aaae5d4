"""What a model is trained on: an objective turns packed rows into inputs, labels and weights for one causal forward.

The loss is always the same sum: over the terms of the objective, coefficient * sum of weight * cross-entropy. The
weights carry the whole normalization, counted over the *global* batch, so accumulation and sharding change nothing but
the order of summation.

Axes: B rows, T row length, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_collections

from refusion_jax.batch.rows import Rows
from refusion_jax.systems.refusion import slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """The inputs of one forward and what its logits are compared with."""

    inputs: jax.Array  # [B, T] int32
    positions: jax.Array  # [B, T] int32
    segment_ids: jax.Array  # [B, T] int32
    labels: jax.Array  # [B, T] int32
    weights: dict[str, jax.Array]  # loss term -> [B, T] float32, 0 where the term has no label


@dataclasses.dataclass(frozen=True)
class Objective:
    """How to train."""

    prepare: Callable[[Rows, jax.Array], Batch]  # (rows, PRNG keys [B]) -> batch; all randomness comes from the keys
    coefficients: dict[str, float]  # of each loss term in the total


def make_objective(config: ml_collections.ConfigDict, mask_id: int) -> Objective:
    """The objective that a config names."""
    if config.objective == "ar":
        return Objective(lambda rows, keys: next_token_batch(rows), {"ar": 1.0})
    sizes, eps = tuple(config.slots.sizes), config.slots.eps
    return Objective(
        functools.partial(draw_hybrid_batch, sizes=sizes, eps=eps, mask_id=mask_id),
        {"ar": 1.0, "mdm": config.slots.mdm_weight},
    )


def draw_hybrid_batch(rows: Rows, keys: jax.Array, sizes: tuple[int, ...], eps: float, mask_id: int) -> Batch:
    """ReFusion: corrupts the rows with noise drawn from the keys [B], for the hybrid loss."""
    return hybrid_batch(slots.corrupt(rows, slots.draw_noise(keys, rows, sizes, eps), mask_id))


def hybrid_batch(c: slots.Corrupted) -> Batch:
    """Weights of the hybrid loss (ReFusion, arXiv 2512.13586, section 3.2) over a batch of N documents.

    ar: the mean over all clean labels of the batch. mdm: 1/N * sum over masked tokens of CE / (p R), where p and R are
    the mask probability and the response length of the token's document. A term without labels is 0, never NaN.
    """
    documents = count_documents(c.segment_ids)
    return Batch(
        inputs=c.inputs,
        positions=c.positions,
        segment_ids=c.segment_ids,
        labels=c.labels,
        weights={
            "ar": mean_over(c.clean_label),
            "mdm": c.masked_label / (documents * c.mask_probability * jnp.maximum(c.response_length, 1)),
        },
    )


def next_token_batch(rows: Rows) -> Batch:
    """Left-to-right baseline: every response token is predicted from the token before it; a mean over the batch."""
    same_document = rows.segment_ids[:, 1:] == rows.segment_ids[:, :-1]
    return Batch(
        inputs=rows.tokens,
        positions=slots.text_positions(rows.segment_ids),
        segment_ids=rows.segment_ids,
        labels=jnp.pad(rows.tokens[:, 1:], ((0, 0), (0, 1))),
        weights={"ar": mean_over(jnp.pad(rows.is_response[:, 1:] & same_document, ((0, 0), (0, 1))))},
    )


def mean_over(has_label: jax.Array) -> jax.Array:
    """Weights [B, T] float32 that make a weighted sum the mean over the labels; all 0 where there is none."""
    return has_label / jnp.maximum(jnp.sum(has_label), 1).astype(jnp.float32)


def count_documents(segment_ids: jax.Array) -> jax.Array:
    """float32 scalar: documents in the batch, at least 1."""
    is_first = (slots.text_positions(segment_ids) == 0) & (segment_ids > 0)
    return jnp.maximum(jnp.sum(is_first), 1).astype(jnp.float32)


def loss_terms(logits: jax.Array, batch: Batch) -> dict[str, jax.Array]:
    """`weigh` of the logits of a batch, for where they are at hand: the definition of the loss.

    Args:
      logits: [B, T, V] float32.
      batch: of the same rows.
    """
    label_logits = jnp.take_along_axis(logits, batch.labels[..., None], axis=-1)[..., 0]
    return weigh(jax.nn.logsumexp(logits, axis=-1) - label_logits, batch)


def weigh(cross_entropy: jax.Array, batch: Batch) -> dict[str, jax.Array]:
    """Every term's weighted sum of cross-entropies [B, T] float32, a float32 scalar each."""
    return {name: jnp.sum(weight * cross_entropy) for name, weight in batch.weights.items()}


def is_labelled(batch: Batch) -> jax.Array:
    """[B, T] bool: tokens that some term of the loss looks at."""
    return functools.reduce(jnp.logical_or, (weight > 0 for weight in batch.weights.values()))
