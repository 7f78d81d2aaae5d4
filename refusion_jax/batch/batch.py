"""What a model is trained on: the inputs of one forward, and what its logits are compared with.

The loss is a sum over the terms of the objective, coefficient * sum of weight * cross-entropy; an objective that is not
linear in the cross-entropies says by `combine` what its terms are. The weights carry the whole normalization, counted
over the *global* batch, so accumulation and sharding change nothing but the order of summation.

Axes: B rows, T input length, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, Shaped

from refusion_jax.batch.rows import text_positions
from refusion_jax.batch.visibility import Visibility


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """The inputs of one forward and what its logits are compared with."""

    inputs: Int32[Array, "B T"]
    positions: Int32[Array, "B T"]  # of each token in its text (RoPE)
    visibility: Visibility
    labels: Int32[Array, "B T"]
    weights: dict[str, Float32[Array, "B T"]]  # by loss term; 0 where it has no label
    facts: dict[str, Shaped[Array, "B T"]] = dataclasses.field(default_factory=dict)  # for reports; not trained on
    # (cross-entropies, batch) -> terms, as `weigh`, where a term is no weighted sum; hashable. Terms add up over rows,
    # as micro-batches do.
    combine: Callable | None = dataclasses.field(default=None, metadata={"static": True})


def mean_over(has_label: Bool[Array, "B T"]) -> Float32[Array, "B T"]:
    """Weights that make a weighted sum the mean over the labels; all 0 where there is none."""
    return has_label / jnp.maximum(jnp.sum(has_label), 1).astype(jnp.float32)


def count_documents(segment_ids: Int32[Array, "B T"]) -> Float32[Array, ""]:
    """Documents in the batch, at least 1."""
    is_first = (text_positions(segment_ids) == 0) & (segment_ids > 0)
    return jnp.maximum(jnp.sum(is_first), 1).astype(jnp.float32)


def loss_terms(logits: Float32[Array, "B T V"], batch: Batch) -> dict[str, Float32[Array, ""]]:
    """`weigh` of the logits of a batch, for where they are at hand: the definition of the loss."""
    label_logits = jnp.take_along_axis(logits, batch.labels[..., None], axis=-1)[..., 0]
    return weigh(jax.nn.logsumexp(logits, axis=-1) - label_logits, batch)


def weigh(cross_entropy: Float32[Array, "B T"], batch: Batch) -> dict[str, Float32[Array, ""]]:
    """Every term: the weighted sum of cross-entropies, unless the batch combines them otherwise."""
    if batch.combine:
        return batch.combine(cross_entropy, batch)
    return {name: jnp.sum(weight * cross_entropy) for name, weight in batch.weights.items()}


def is_labelled(batch: Batch) -> Bool[Array, "B T"]:
    """Tokens that some term of the loss looks at."""
    return functools.reduce(jnp.logical_or, (weight > 0 for weight in batch.weights.values()))
