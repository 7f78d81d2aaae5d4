"""A training batch: the inputs of one forward pass, labels, and the weights of the loss.

The loss is the sum over the terms of the objective of coefficient * sum of weight * cross-entropy; an objective that is
not linear in the cross-entropies defines its terms by `combine`. The weights include the whole normalization, over the
*global* batch, so that accumulation and sharding only change the order of summation.

Axes: B rows, T input length.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32, Shaped

from refusion_jax.batch.rows import text_positions
from refusion_jax.batch.visibility import Visibility


@struct.dataclass
class Batch:
    """The inputs of one forward pass, with labels and weights of the loss."""

    inputs: Int32[Array, "B T"]
    positions: Int32[Array, "B T"]  # of each token in its text, for RoPE
    visibility: Visibility
    labels: Int32[Array, "B T"]
    weights: dict[str, Float32[Array, "B T"]]  # by loss term; 0 without a label
    # Reports split held-out losses by them: shares from 0 to 1, or integers, of which the 16 smallest are reported.
    diagnostics: dict[str, Shaped[Array, "B T"]] = dataclasses.field(default_factory=dict)
    # (cross-entropies, batch) -> terms, like `weigh`, if a term is not a weighted sum. Hashable. Terms must be sums
    # over rows, so that micro-batches add up; no report splits them.
    combine: Callable | None = struct.field(pytree_node=False, default=None)


def mean_over(has_label: Bool[Array, "B T"]) -> Float32[Array, "B T"]:
    """Weights that turn a weighted sum into the mean over all labels; all 0 if there are none."""
    return has_label / jnp.maximum(jnp.sum(has_label), 1).astype(jnp.float32)


def count_documents(segment_ids: Int32[Array, "B T"]) -> Float32[Array, ""]:
    """The number of documents in the batch, at least 1."""
    is_first = (text_positions(segment_ids) == 0) & (segment_ids > 0)
    return jnp.maximum(jnp.sum(is_first), 1).astype(jnp.float32)


def weigh(cross_entropy: Float32[Array, "B T"], batch: Batch) -> dict[str, Float32[Array, ""]]:
    """All terms, from cross-entropies: weighted sums, unless the batch has `combine`."""
    if batch.combine:
        return batch.combine(cross_entropy, batch)
    return {name: jnp.sum(weight * cross_entropy) for name, weight in batch.weights.items()}


def is_labelled(batch: Batch) -> Bool[Array, "B T"]:
    """Which tokens have a label in any term: those with a weight, which may be negative."""
    return functools.reduce(jnp.logical_or, (weight != 0 for weight in batch.weights.values()))
